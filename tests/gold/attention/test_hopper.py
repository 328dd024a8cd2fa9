"""The Hopper kernels without a GPU: compilation, and the choice of tier."""

import itertools
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.dense import dense_problem  # noqa: E402
from trapline.gold.attention.dense.hopper import backward, backward_dkdv, forward  # noqa: E402
from trapline.gold.attention.dense.hopper import tiles as hopper  # noqa: E402
from trapline.gold.attention.dense.registry import (  # noqa: E402
    backward_tiers,
    fastest,
    forward_tiers,
)

HERE = Path(__file__).parent
#: Bytes a thread may keep outside of its registers: three consumers are short of them.
SPILLED = {2: 0, 3: 256}
#: Width and number of queries of every plan there is.
CUTS = [(D, T) for D in sorted(forward.CONFIGS) for T in (512, 4096) if (D, T) != (128, 512)]
FORWARD = [
    (dtype, D, causal, T)
    for dtype, (D, T), causal in itertools.product(("bf16", "fp16"), CUTS, (True, False))
]
QUICK = [("bf16", 128, True, 4096)]
BACKWARD = list(itertools.product(("bf16", "fp16"), sorted(backward.CONFIGS), (True, False)))
RING = "dq in a ring"
NAMES = ["dq in order", RING, "dq in shares", "rows", "order"]


@pytest.mark.parametrize("wanted", [pytest.param(FORWARD, marks=pytest.mark.full, id="all"), QUICK])
def test_forward_compiles_and_overlaps(compiled, wanted):
    """Two consumers or three, two loops each: in all of them softmax runs beside a product."""
    found = compiled(HERE / "compile_hopper.py", wanted)
    assert [entry["wanted"] for entry in found] == [list(one) for one in wanted]
    for entry in found:
        _, D, _, T = entry["wanted"]
        config = forward.config_for(T, D)
        assert max(entry["spilled"]) <= SPILLED[config.consumers], entry
        assert not entry["serialised"], entry
        # A row's 128 weights lie in four lanes, two rows a lane.
        whole = [n for n in entry["exponentials_while_waiting"] if n >= config.block_s // 2]
        assert len(whole) >= config.consumers * 2, entry


@pytest.mark.parametrize(
    "wanted", [pytest.param(BACKWARD, marks=pytest.mark.full, id="all"), BACKWARD[2:4]]
)
def test_backward_compiles_and_its_products_overlap(compiled, wanted):
    found = compiled(HERE / "compile_hopper.py", wanted)
    assert [(*entry["wanted"], entry["name"]) for entry in found] == [
        (*one, name) for one in wanted for name in NAMES if name != RING or not one[2]
    ]
    for entry in found:
        assert not entry["serialised"], entry
        # Addresses that stay the same may wait in local memory; a tile of anything would be more.
        assert sum(entry["spilled"]) <= 256, entry
        assert entry["shared"] <= 227 * 1024, entry
        (_, D, _), name = entry["wanted"], entry["name"]
        ordered, free = name in NAMES[:2], name == NAMES[2]
        copy = backward.CONFIGS[D].copy
        assert entry["copied"] == (ordered or (free and copy)), entry
        assert entry["reduced_by_fours"] == (free and not copy), entry
        assert entry["products"] == (ordered or free), entry
        assert entry["waits_for_its_turn"] == entry["lets_the_next"] == ordered, entry
        # Each consumer has a place where a whole tile's exponentials run beside a product: of 64 by
        # 64 weights a thread has 32.
        beside = [count for count in entry["exponentials_while_waiting"] if count >= 32]
        assert len(beside) >= 2 if ordered or free else not beside, entry


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
    assert not found["turns"].any()
    given = found["given"].reshape(H, -1, found["dq"].shape[-1])[:, :T]
    np.testing.assert_array_equal(found["late"][0], 2 * given)
    np.testing.assert_array_equal(found["dq"][0, :, block:], 2 * given[:, block:])
    assert found["dq"][0, :, :block].any()


def test_few_queries_of_narrow_heads_use_the_plain_kernel():
    chosen = {
        (T, D, causal): fastest(asked(T=T, S=T, D=D, causal=causal), forward_tiers())
        for T, D, causal in itertools.product((64, 512, 2048), (64, 128), (True, False))
    }
    plain = {case for case, tier in chosen.items() if tier == "triton"}
    few = {(64, D, causal) for D in (64, 128) for causal in (True, False)}
    assert plain == few | {(512, 64, False)}


def test_few_queries_use_smaller_tiles():
    assert forward.config_for(1024, 64).consumers == 2
    assert forward.config_for(1025, 64).consumers == 3
    assert forward.config_for(512, 128) == forward.config_for(4096, 128)


class Program:
    """Stands in for Gluon's language: one program of a grid, on plain integers."""

    def __init__(self, number, programs):
        self.program_id = lambda _axis: number
        self.num_programs = lambda _axis: programs

    cdiv = staticmethod(lambda a, b: -(-a // b))
    minimum, maximum = min, max
    where = staticmethod(lambda condition, a, b: a if condition else b)


def assigned(problem, height, causal, programs):
    """The tiles of every program of a grid, by the kernel's own functions."""
    T, S, H, groups, group = problem
    tiles = -(-T // height) * groups * group
    sizes = T, S, H, 1, groups, group, tiles
    for number in range(min(programs, tiles)):
        known = {"gl": Program(number, min(programs, tiles))}
        my_tiles, place = (
            FunctionType(function.fn.__code__, known)
            for function in (hopper.my_tiles, hopper.place)
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
def test_every_tile_is_assigned_once_and_sees_its_keys(T, S, B, H, height, causal):
    groups = hopper.head_groups(B * H, -(-T // height), 132)
    dealings = list(assigned((T, S, H, *groups), height, causal, 132))
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
def test_causal_work_is_balanced_and_a_group_fits_the_cache(heads, T):
    groups, group = hopper.head_groups(heads, T // 128, 132)
    dealings = assigned((T, T, heads, groups, group), 128, True, 132)
    work = [sum(count + 1.5 for _, _, _, count, _ in tiles) for tiles in dealings]
    assert max(work) <= 1.04 * sum(work) / len(work)
    assert group * T * 128 * 2 * 2 <= 17 << 20


def asked(B=1, H=2, G=1, T=200, S=300, D=128, dtype=torch.bfloat16, **rules):
    q, k = torch.zeros(B, H, T, D, dtype=dtype), torch.zeros(B, G, S, D, dtype=dtype)
    return dense_problem(q, k, k, **{"causal": True} | rules)


def test_supported_problems():
    for D, dtype in itertools.product(forward.CONFIGS, hopper.TYPES):
        assert hopper.supports(asked(D=D, dtype=dtype)) is None
    problem = asked()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem[:3])
    assert hopper.supports(problem._replace(q=q, k=k, v=v)) is None


def tier(problem):
    return fastest(problem, backward_tiers())


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_hopper_is_chosen_where_it_is_faster(deterministic, causal):
    """Both ways for wide heads; for narrow causal ones unless long gradients are repeatable."""
    for D, dtype in itertools.product(backward.CONFIGS, (torch.bfloat16, torch.float16)):
        asking = {"D": D, "dtype": dtype, "deterministic": deterministic, "causal": causal}
        for T in (512, 4096, 8192):
            problem = asked(T=T, S=T, **asking)
            assert hopper.supports(problem) is None
            wins = D == 128 or (causal and (T <= 4096 or not deterministic))
            assert tier(problem) == ("hopper" if wins else "triton")


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
def test_unsupported_problems_are_named(word, changes):
    assert word in hopper.supports(asked(**changes))
    assert tier(asked(**changes)) == "triton"


def test_unaligned_strides_and_addresses_are_not_supported():
    problem = asked(T=300)
    q = problem.q
    for odd in (
        q.transpose(2, 3).contiguous().transpose(2, 3),
        torch.zeros(1, 2, 300, 129, dtype=q.dtype)[..., 1:],
    ):
        assert "multiples of 16 bytes" in hopper.supports(problem._replace(q=odd))


def test_few_queries_use_the_plain_kernels_backward():
    assert hopper.supports(asked(T=64)) is None
    assert tier(asked(T=64)) == "triton"


def test_tiles_of_concurrent_groups_are_assigned_together():
    for ordered in (True, False):
        assert backward.bunch(4, 2, 9, causal=True, ordered=ordered) == 2
        assert backward.bunch(4, 5, 9, causal=True, ordered=ordered) == 1
    assert backward.bunch(132, 128, 64, causal=False, ordered=False) == 1
    assert backward.bunch(132, 128, 64, causal=False, ordered=True) == 8
    assert backward.bunch(132, 128, 3, causal=False, ordered=True) == 3
    assert backward.bunch(132, 4, 64, causal=False, ordered=True) == 33


def shares_by_turn(sizes, causal, ring=False):
    """The shares of each query tile in order, by the kernel's own functions: their turns, programs,
    steps and tiles of keys."""
    T, S, H, R, groups, _ = sizes
    found = {}
    for number in range(groups * -(-S // 128)):
        known = {"gl": Program(number, 1), "ROWS": 64, "QUERIES": 64}
        known["assigned"] = FunctionType(hopper.assigned.fn.__code__, known)
        key_tile, turn, stepped = (
            FunctionType(getattr(backward_dkdv, name).fn.__code__, known)
            for name in ("key_tile", "turn", "stepped")
        )
        b, g, tile, walk = key_tile(0, sizes, causal, True, ring)
        tiles, j, way, count = walk
        assert tiles == -(-T // 64)
        head = b * H + g * R
        for i in range(count * R):
            place = turn(tile, j, way, sizes, causal, ring)
            found.setdefault(head * tiles + j, []).append((place, number, i, tile))
            j, rounds = stepped(j, walk, ring)
            head += rounds
        assert head == b * H + (g + 1) * R
    return {row: sorted(shares) for row, shares in found.items()}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("T", "S", "B", "H", "R"),
    [
        (1024, 1024, 2, 16, 1),
        (1024, 1024, 1, 15, 1),
        (640, 640, 1, 12, 4),
        (130, 700, 1, 7, 1),
        (700, 130, 1, 6, 2),
        (1, 1, 1, 2, 1),
        (65, 300, 3, 2, 2),
    ],
)
@pytest.mark.parametrize("running", [132, 20, 1])
def test_shares_of_dq_wait_only_for_earlier_programs(T, S, B, H, R, running, causal):
    """Then the program with the lowest number that is not done never waits, whatever else runs."""
    groups, tiles = B * H // R, -(-S // 128)
    bunch = backward.bunch(running, tiles, groups, causal, ordered=True)
    found = shares_by_turn((T, S, H, R, groups, bunch), causal)
    for row, shares in found.items():
        first = 64 * (row % -(-T // 64))
        last = min(S, first + 64 + S - T) - 1 if causal else S - 1
        turns, numbers, _steps, keys = zip(*shares, strict=True)
        assert list(turns) == list(range(last // 128 + 1))
        assert sorted(keys) == list(turns)
        assert list(numbers) == sorted(set(numbers))
    blind = max(0, T - S) // 64 if causal else 0
    assert len(found) == B * H * (-(-T // 64) - blind)


@pytest.mark.parametrize(
    ("T", "S", "H", "R"),
    [
        (4096, 4096, 2, 1),
        (2048, 2048, 4, 2),
        (2112, 4000, 2, 2),
        (70, 2100, 2, 1),
        (9000, 2100, 1, 1),
    ],
)
def test_shares_in_a_ring_wait_only_for_earlier_steps(T, S, H, R):
    """All programs run: then the one that has done the fewest steps never waits."""
    groups, keys = H // R, -(-S // 128)
    found = shares_by_turn((T, S, H, R, groups, 0), causal=False, ring=True)
    assert len(found) == H * -(-T // 64)
    for shares in found.values():
        turns, _numbers, steps, tiles = zip(*shares, strict=True)
        assert list(turns) == list(range(keys))
        order = [(step, -tile) for step, tile in zip(steps, tiles, strict=True)]
        assert order == sorted(set(order))


def test_a_ring_needs_a_processor_for_each_tile():
    def ring(length, groups=64, running=132, **changes):
        problem = SimpleNamespace(**{"deterministic": True, "causal": False, **changes})
        return backward.walks_in_a_ring(running, -(-length // 128), groups, problem)

    assert ring(16384)
    assert ring(4096)
    assert ring(1024)
    assert not ring(32768)
    assert not ring(16384, running=114)
    assert not ring(5120)  # three heads at once leave twelve processors idle
    assert not ring(4096, causal=True)
    assert not ring(4096, deterministic=False)
