"""The Hopper backward without a GPU: what compiles, and what it leaves to the plain kernels."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.dense import tiers as kernels  # noqa: E402
from trapline.gold.attention.dense.hopper import backward as kernels_hopper_bwd  # noqa: E402

HERE = Path(__file__).parent
ALL = list(itertools.product(("bf16", "fp16"), sorted(kernels_hopper_bwd.PLANS), (True, False)))
#: Of 64 by 64 weights a thread has 32; of 64 by 128 it has 64.
WEIGHTS = {"dk, dv and shares of dq": 32, "dk, dv": 32, "dq": 64}
NAMES = [*WEIGHTS, "rows", "order"]


@pytest.mark.parametrize("wanted", [pytest.param(ALL, marks=pytest.mark.full, id="all"), ALL[2:3]])
def test_the_kernels_compile_and_their_products_do_not_wait_for_each_other(
    tmp_path, run_script, wanted
):
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    run_script(HERE / "compile_hopper_bwd.py", tmp_path, TRITON_INTERPRET="0")
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert [(*entry["wanted"], entry["name"]) for entry in compiled] == [
        (*one, name) for one in wanted for name in NAMES
    ]
    for entry in compiled:
        assert entry["shared"] <= 232448, entry
        assert not entry["serialised"], entry
        # Addresses that stay the same may wait in local memory; a tile of anything would be more.
        assert entry["spilled"] <= 256, entry
        shares, D = entry["name"] == NAMES[0], entry["wanted"][1]
        copy = kernels_hopper_bwd.PLANS[D].copy
        assert entry["copied"] == (shares and copy), entry
        assert entry["reduced_by_fours"] == (shares and not copy), entry
        assert entry["products"] == (entry["name"] in WEIGHTS), entry
        # Each consumer has a place where a whole tile's exponentials run beside a product.
        weights = WEIGHTS.get(entry["name"])
        beside = [count for count in entry["exponentials_while_waiting"] if count >= (weights or 1)]
        assert len(beside) >= 2 if weights else not beside, entry


def test_rows_before_and_order_after(tmp_path, run_script):
    """lse in base 2, δ times a mantissa, inf where nothing is seen; sums in order of registers."""
    run_script(HERE / "interpret_hopper_rows.py", tmp_path, TRITON_INTERPRET="1")
    with np.load(tmp_path / "rows.npz") as kept:
        found = {name: kept[name] for name in kept.files}
    (_, H, T, _), block = found["dq"].shape, found["rows"].shape[-1]
    rows = found["rows"].reshape(H, -1, 2, block).swapaxes(1, 2).reshape(H, 2, -1)
    wanted = found["lse"][0] * np.log2(np.e)
    wanted[1, 3] = np.inf
    np.testing.assert_allclose(rows[:, 0, :T], wanted, rtol=1e-6)
    assert np.isposinf(rows[:, 0, T:]).all()
    delta = 0.75 * ((found["dout"] * found["out"]).sum(-1) - found["dlse"])
    np.testing.assert_allclose(rows[:, 1, :T], delta[0], rtol=1e-5, atol=1e-5)
    assert not rows[:, 1, T:].any()
    assert not found["sums"].any()
    given = found["given"].reshape(H, -1, found["dq"].shape[-1])[:, :T]
    np.testing.assert_array_equal(found["dq"][0], 2 * given)


def asked(T=200, S=300, D=128, dtype=torch.bfloat16, deterministic=False, **rules):
    q, k = torch.zeros(1, 2, T, D, dtype=dtype), torch.zeros(1, 1, S, D, dtype=dtype)
    lse = torch.zeros(1, 2, T)
    rules = {"causal": True, "window": 0, "softcap": 0.0, "scale": 1.0} | rules
    return q, lse, q, k, k, q, lse, *rules.values(), deterministic


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_chosen_where_it_was_faster(deterministic, causal):
    """Both ways for wide heads; for narrow ones only causal shares of dq."""
    for D, dtype in itertools.product(kernels_hopper_bwd.PLANS, (torch.bfloat16, torch.float16)):
        asking = {"D": D, "dtype": dtype, "deterministic": deterministic, "causal": causal}
        problem = asked(T=4096, S=4096, **asking)
        assert kernels_hopper_bwd.lacks(*problem) is None
        wins = D == 128 or (causal and not deterministic)
        assert kernels.chosen("backward", *problem) == ("hopper" if wins else "triton")


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("window", {"window": 5}),
        ("softcap", {"softcap": 3.0}),
        ("float32", {"dtype": torch.float32}),
        ("96 wide", {"D": 96}),
        ("empty", {"S": 0}),
    ],
)
def test_it_says_what_it_lacks(word, changes):
    assert word in kernels_hopper_bwd.lacks(*asked(**changes))
    assert kernels.chosen("backward", *asked(**changes)) == "triton"


def test_left_out_arguments_have_their_defaults():
    assert kernels.chosen("backward", *asked(T=4096, D=64)[:-1]) == "triton"


def test_few_queries_are_left_to_smaller_tiles():
    assert kernels_hopper_bwd.lacks(*asked(T=64)) is None
    assert kernels.chosen("backward", *asked(T=64)) == "triton"


def test_causal_tiles_of_as_many_groups_as_run_at_once_are_dealt_together():
    q = torch.zeros(1)  # four processors stand in for a GPU's
    assert kernels_hopper_bwd.bunch(q, 2, causal=True) == 2
    assert kernels_hopper_bwd.bunch(q, 5, causal=True) == 1
    assert kernels_hopper_bwd.bunch(q, 1, causal=False) == 1
