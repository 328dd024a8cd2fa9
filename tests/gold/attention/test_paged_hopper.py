"""What Hopper's decoding over pages takes and how it is cut; no GPU is needed."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.paged.hopper import decode as hopper  # noqa: E402

#: Of a multiprocessor, in bytes; every program takes another one for itself.
SHARED, OWN = 228 << 10, 1 << 10
PLAIN, INT8, FP8, INT4 = range(4)


def ring(kind, D, plan):
    """Bytes of a program's tiles."""
    row = {PLAIN: 2 * D, INT4: D // 2}.get(kind, D)
    return plan.stages * plan.positions * 2 * row


@pytest.mark.parametrize(("kind", "D"), hopper.PLANS)
def test_as_many_programs_fit_as_are_planned(kind, D):
    for R in (1, 4, 8):
        plan = hopper.plan_for(kind, D, R)
        # Gates, and a few hundred bytes to move scales between lanes.
        assert plan.programs * (ring(kind, D, plan) + OWN + 1024) <= SHARED


@pytest.mark.parametrize(("kind", "D"), hopper.PLANS)
@pytest.mark.parametrize("P", [16, 32, 48, 64, 128])
def test_a_box_is_of_one_page_and_at_most_128_bytes_wide(kind, D, P):
    plan = hopper.plan_for(kind, D, 4)
    _, _, positions, columns = hopper.box_of(kind, D, P, plan.positions)
    assert P % positions == 0 == plan.positions % positions
    assert positions % 8 == 0  # what a swizzle repeats after
    width = columns * (2 if kind == PLAIN else 1)
    assert width <= 128
    assert {PLAIN: 2 * D, INT4: D // 2}.get(kind, D) % width == 0


def test_more_heads_than_a_tile_has_columns_are_left_to_the_other_kernel():
    for kind, D in hopper.PLANS:
        assert hopper.plan_for(kind, D, 8) is not None
        assert hopper.plan_for(kind, D, 9) is None
    for kind, D in [*itertools.product(range(4), (96, 256)), (FP8, 64)]:
        assert hopper.plan_for(kind, D, 4) is None


def test_the_copy_engine_wants_steps_of_sixteen_bytes():
    pages = torch.zeros(3, 2, 16, 64, dtype=torch.int8)
    assert hopper.fits(pages)
    assert hopper.fits(pages.transpose(1, 2))
    assert not hopper.fits(pages[..., 1:])
    assert not hopper.fits(torch.zeros(3, 2, 16, 72, dtype=torch.int8)[..., :64])
    assert not hopper.fits(pages[:0])
    assert not hopper.fits(pages[:1].expand(3, -1, -1, -1))


def test_a_cpu_has_another_way():
    q, pages = torch.zeros(32, 32, 128).half(), torch.zeros(64, 8, 16, 128).half()
    assert not hopper.takes(q, pages, pages, torch.zeros(32, 2).int(), PLAIN)
