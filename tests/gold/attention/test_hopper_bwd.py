"""The Hopper backward pass without a GPU: compilation, and the choice of tier."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.dense import dense_problem, hopper  # noqa: E402
from trapline.gold.attention.dense.hopper import backward  # noqa: E402
from trapline.gold.attention.dense.registry import backward_tiers, fastest  # noqa: E402

HERE = Path(__file__).parent
ALL = list(itertools.product(("bf16", "fp16"), sorted(backward.CONFIGS), (True, False)))
#: Of 64 by 64 weights a thread has 32; of 64 by 128 it has 64.
WEIGHTS = {"dk, dv and shares of dq": 32, "dk, dv": 32, "dq": 64}
NAMES = [*WEIGHTS, "rows", "order"]


@pytest.mark.parametrize("wanted", [pytest.param(ALL, marks=pytest.mark.full, id="all"), ALL[2:3]])
def test_kernels_compile_and_their_products_overlap(tmp_path, run_script, wanted):
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
        copy = backward.CONFIGS[D].copy
        assert entry["copied"] == (shares and copy), entry
        assert entry["reduced_by_fours"] == (shares and not copy), entry
        assert entry["products"] == (entry["name"] in WEIGHTS), entry
        # Each consumer has a place where a whole tile's exponentials run beside a product.
        weights = WEIGHTS.get(entry["name"])
        beside = [count for count in entry["exponentials_while_waiting"] if count >= (weights or 1)]
        assert len(beside) >= 2 if weights else not beside, entry


def test_prepare_and_finish_kernels(tmp_path, run_script):
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
    return dense_problem(q, k, k, **{"causal": True} | rules, deterministic=deterministic)


def tier(problem):
    return fastest(problem, backward_tiers())


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_hopper_is_chosen_where_it_is_faster(deterministic, causal):
    """Both ways for wide heads; for narrow ones only causal shares of dq."""
    for D, dtype in itertools.product(backward.CONFIGS, (torch.bfloat16, torch.float16)):
        asking = {"D": D, "dtype": dtype, "deterministic": deterministic, "causal": causal}
        problem = asked(T=4096, S=4096, **asking)
        assert hopper.supports(problem) is None
        wins = D == 128 or (causal and not deterministic)
        assert tier(problem) == ("hopper" if wins else "triton")


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
def test_unsupported_problems_are_named(word, changes):
    assert word in hopper.supports(asked(**changes))
    assert tier(asked(**changes)) == "triton"


def test_few_queries_use_the_plain_kernels():
    assert hopper.supports(asked(T=64)) is None
    assert tier(asked(T=64)) == "triton"


def test_causal_tiles_of_concurrent_groups_are_assigned_together():
    q = torch.zeros(1)  # four processors stand in for a GPU's
    assert backward.bunch(q, 2, causal=True) == 2
    assert backward.bunch(q, 5, causal=True) == 1
    assert backward.bunch(q, 1, causal=False) == 1
