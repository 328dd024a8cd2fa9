"""The Hopper forward without a GPU: what compiles, and what it leaves to the plain kernels."""

import itertools
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention import kernels_hopper_fwd as hopper  # noqa: E402

HERE = Path(__file__).parent
ALL = list(itertools.product(("bf16", "fp16"), sorted(hopper.PLANS), (True, False)))


@pytest.mark.parametrize("wanted", [pytest.param(ALL, marks=pytest.mark.full, id="all"), ALL[2:3]])
def test_the_kernel_compiles_without_spills_and_overlaps(tmp_path, run_script, wanted):
    """Two consumers or three, two loops each: in all of them softmax runs beside a product."""
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    run_script(HERE / "compile_hopper_fwd.py", tmp_path, TRITON_INTERPRET="0")
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert [entry["wanted"] for entry in compiled] == [list(one) for one in wanted]
    for entry in compiled:
        plan = hopper.PLANS[entry["wanted"][1]]
        assert entry["shared"] <= 232448, entry
        assert max(entry["spilled"]) == 0, entry
        assert not entry["serialised"], entry
        # A row's 128 weights lie in four lanes, two rows a lane.
        assert entry["exponentials_while_waiting"] == [plan.block_s // 2 + 2] * plan.consumers * 2


def asked(B=1, H=2, G=1, T=200, S=300, D=128, dtype=torch.bfloat16, **rules):
    q, k = torch.zeros(B, H, T, D, dtype=dtype), torch.zeros(B, G, S, D, dtype=dtype)
    rules = {"causal": True, "window": 0, "softcap": 0.0, "scale": 1.0} | rules
    return q, k, k, *rules.values()


def test_it_takes_what_it_was_made_for():
    for D, dtype in itertools.product(hopper.PLANS, hopper.TYPES):
        assert hopper.lacks(*asked(D=D, dtype=dtype)) is None
    q, k, v, *rules = asked()
    assert (
        hopper.lacks(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), *rules)
        is None
    )


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("window", {"window": 5}),
        ("softcap", {"softcap": 3.0}),
        ("float32", {"dtype": torch.float32}),
        ("96 wide", {"D": 96}),
        ("empty", {"S": 0}),
        ("empty", {"T": 0}),
    ],
)
def test_it_says_what_it_lacks(word, changes):
    assert word in hopper.lacks(*asked(**changes))


def test_it_leaves_odd_strides_and_addresses_to_the_plain_kernels():
    q, k, v, *rules = asked(T=300)
    for odd in (
        q.transpose(2, 3).contiguous().transpose(2, 3),
        torch.zeros(1, 2, 300, 129, dtype=q.dtype)[..., 1:],
    ):
        assert "multiples of 16 bytes" in hopper.lacks(odd, k, v, *rules)
