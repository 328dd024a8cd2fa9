"""The Hopper forward without a GPU: what compiles, and what it leaves to the plain kernels."""

import itertools
import json
from pathlib import Path
from types import FunctionType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.dense import tiers as kernels  # noqa: E402
from trapline.gold.attention.dense.hopper import forward_launch as hopper  # noqa: E402
from trapline.gold.attention.dense.hopper import work_partition as order  # noqa: E402

HERE = Path(__file__).parent
#: Bytes a thread may keep outside of its registers: three consumers are short of them.
SPILLED = {2: 0, 3: 256}
#: Width and number of queries of every plan there is.
CUTS = [(D, T) for D in sorted(hopper.PLANS) for T in (512, 4096) if (D, T) != (128, 512)]
ALL = [
    (dtype, D, causal, T)
    for dtype, (D, T), causal in itertools.product(("bf16", "fp16"), CUTS, (True, False))
]
QUICK = [("bf16", 128, True, 4096)]


@pytest.mark.parametrize("wanted", [pytest.param(ALL, marks=pytest.mark.full, id="all"), QUICK])
def test_the_kernel_compiles_and_overlaps(tmp_path, run_script, wanted):
    """Two consumers or three, two loops each: in all of them softmax runs beside a product."""
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    run_script(HERE / "compile_hopper_fwd.py", tmp_path, TRITON_INTERPRET="0")
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert [entry["wanted"] for entry in compiled] == [list(one) for one in wanted]
    for entry in compiled:
        _, D, _, T = entry["wanted"]
        plan = hopper.plan_for(T, D)
        assert entry["shared"] <= 232448, entry
        assert max(entry["spilled"]) <= SPILLED[plan.consumers], entry
        assert not entry["serialised"], entry
        # A row's 128 weights lie in four lanes, two rows a lane.
        whole = [n for n in entry["exponentials_while_waiting"] if n >= plan.block_s // 2]
        assert len(whole) >= plan.consumers * 2, entry


def test_few_queries_of_narrow_heads_that_see_everything_are_left_to_smaller_tiles():
    chosen = {
        (T, D, causal): kernels.chosen("forward", *asked(T=T, S=T, D=D, causal=causal))
        for T, D, causal in itertools.product((64, 512, 2048), (64, 128), (True, False))
    }
    plain = {case for case, tier in chosen.items() if tier == "triton"}
    few = {(64, D, causal) for D in (64, 128) for causal in (True, False)}
    assert plain == few | {(512, 64, False)}


def test_few_queries_are_cut_into_lower_tiles():
    assert hopper.plan_for(1024, 64).consumers == 2
    assert hopper.plan_for(1025, 64).consumers == 3
    assert hopper.plan_for(512, 128) == hopper.plan_for(4096, 128)


class Program:
    """Stands in for Gluon's language: one program of a grid, on plain integers."""

    def __init__(self, number, programs):
        self.program_id = lambda _axis: number
        self.num_programs = lambda _axis: programs

    cdiv = staticmethod(lambda a, b: -(-a // b))
    minimum, maximum = min, max
    where = staticmethod(lambda condition, a, b: a if condition else b)


def dealt(problem, height, causal, programs):
    """What every program of a grid is told to compute, by the kernel's own functions."""
    T, S, H, groups, group = problem
    tiles = -(-T // height) * groups * group
    sizes = T, S, H, 1, groups, group, tiles
    for number in range(min(programs, tiles)):
        known = {"gl": Program(number, min(programs, tiles))}
        my_tiles, place = (
            FunctionType(function.fn.__code__, known) for function in (order.my_tiles, order.place)
        )
        yield [place(turn, sizes, height, 128, causal) for turn in range(my_tiles(sizes[-1]))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("T", "S", "B", "H", "height"),
    [
        (4096, 4096, 4, 16, 128),
        (1024, 1024, 2, 24, 192),
        (130, 700, 1, 7, 128),
        (500, 90, 3, 5, 192),
    ],
)
def test_every_tile_is_dealt_once_and_sees_its_keys(T, S, B, H, height, causal):
    groups = order.together(B * H, -(-T // height), 132)
    dealings = list(dealt((T, S, H, *groups), height, causal, 132))
    found = [tile for tiles in dealings for tile in tiles]
    places = [(b, h, top) for b, h, top, _, _ in found]
    assert sorted(places) == list(itertools.product(range(B), range(H), range(0, T, height)))
    for _, _, top, count, masked in found:
        last = min(S, min(top + height, T) + S - T) if causal else S
        assert (count - 1) * 128 < max(last, 1)
        assert count * 128 >= last
        unmasked = min(S, top + 1 + S - T) if causal else S
        assert 1 <= masked <= count
        assert (count - masked) * 128 <= max(unmasked, 0)


@pytest.mark.parametrize(("heads", "T"), [(16, 16384), (64, 4096), (256, 1024), (32, 8192)])
def test_causal_work_is_spread_evenly_and_a_group_fits_the_cache(heads, T):
    groups, group = order.together(heads, T // 128, 132)
    dealings = dealt((T, T, heads, groups, group), 128, True, 132)
    work = [sum(count + 1.5 for _, _, _, count, _ in tiles) for tiles in dealings]
    assert max(work) <= 1.04 * sum(work) / len(work)
    assert group * T * 128 * 2 * 2 <= 17 << 20


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
