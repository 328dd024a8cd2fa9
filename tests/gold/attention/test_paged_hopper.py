"""Paged decoding for Hopper without a GPU: supported problems, and tile sizes."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.paged import PagedProblem  # noqa: E402
from trapline.gold.attention.paged.hopper import decode as hopper  # noqa: E402

#: Shared memory of a multiprocessor in bytes, and what each program reserves.
SHARED, OWN = 228 << 10, 1 << 10
PLAIN, INT8, FP8, INT4 = range(4)


def ring(kind, D, config):
    """Bytes of a program's tiles."""
    row = {PLAIN: 2 * D, INT4: D // 2}.get(kind, D)
    return config.stages * config.positions * 2 * row


@pytest.mark.parametrize(("kind", "D"), hopper.CONFIGS)
def test_configured_programs_fit_a_multiprocessor(kind, D):
    for R in (1, 4, 8):
        config = hopper.config_for(kind, D, R)
        # Gates, and a few hundred bytes to move scales between lanes.
        assert config.programs * (ring(kind, D, config) + OWN + 1024) <= SHARED


@pytest.mark.parametrize(("kind", "D"), hopper.CONFIGS)
@pytest.mark.parametrize("P", [16, 32, 48, 64, 128])
def test_boxes_lie_on_one_page_and_are_at_most_128_bytes_wide(kind, D, P):
    config = hopper.config_for(kind, D, 4)
    _, _, positions, columns = hopper.box_of(kind, D, P, config.positions)
    assert P % positions == 0 == config.positions % positions
    assert positions % 8 == 0  # what a swizzle repeats after
    width = columns * (2 if kind == PLAIN else 1)
    assert width <= 128
    assert {PLAIN: 2 * D, INT4: D // 2}.get(kind, D) % width == 0


def test_unsupported_heads_and_widths():
    for kind, D in hopper.CONFIGS:
        assert hopper.config_for(kind, D, 8) is not None
        assert hopper.config_for(kind, D, 9) is None
    for kind, D in [*itertools.product(range(4), (96, 256)), (FP8, 64)]:
        assert hopper.config_for(kind, D, 4) is None


def test_strides_must_be_multiples_of_16_bytes():
    pages = torch.zeros(3, 2, 16, 64, dtype=torch.int8)
    assert hopper.fits(pages)
    assert hopper.fits(pages.transpose(1, 2))
    assert not hopper.fits(pages[..., 1:])
    assert not hopper.fits(torch.zeros(3, 2, 16, 72, dtype=torch.int8)[..., :64])
    assert not hopper.fits(pages[:0])
    assert not hopper.fits(pages[:1].expand(3, -1, -1, -1))


def test_unsupported_problems_are_named():
    q, pages = torch.zeros(32, 32, 128).half(), torch.zeros(64, 8, 16, 128).half()
    table, lengths = torch.zeros(32, 2).int(), torch.ones(32).int()
    options = None, 1, None, None, None, 0, 0.0, 0.1, 0, None
    problem = PagedProblem(q, pages, pages, table, lengths, *options, q)
    assert "device" in hopper.supports(problem, PLAIN)
    assert "one query" in hopper.supports(problem._replace(max_q=2), PLAIN)
    assert "window" in hopper.supports(problem._replace(window=5), PLAIN)
