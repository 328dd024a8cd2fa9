"""The quantisers: equal to the oracle in every method and library, idempotent, exact enough."""

from typing import Any

import numpy as np
import pytest
import torch

from trapline.gold import ternarize
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.ternary import oracle
from trapline.gold.ternary.api import dequantize
from trapline.gold.ternary.quantize import METHODS

RNG = np.random.default_rng(7)
SHAPES = [(300,), (3, 300), (2, 3, 130), (4, 128), (5, 1), (0, 7), (3, 0)]


def grid(*shape: int) -> np.ndarray:
    """Weights whose sums are exact: no order of summation can change a decision."""
    return (RNG.integers(-256, 257, shape) / 64).astype(np.float32)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_quantisers_equal_the_oracle(shape: tuple[int, ...], method: str, library: Any) -> None:
    w = grid(*shape)
    got, want = ternarize(library(w), 128, method), oracle.ternarize(w, 128, method)
    for mine, theirs in zip(map(np.asarray, got), want, strict=True):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    assert np.array_equal(np.asarray(dequantize(*got)), oracle.dequantize(*want))


@pytest.mark.parametrize("factor", [1.0, 2.0**-60, 2.0**1017])
@pytest.mark.parametrize(
    ("group", "method", "counted"),
    [
        ([3, 2, 1], "absmean", [1, 1, 0]),
        ([1, 1, 4], "absmean", [0, 0, 1]),
        ([31, -49], "threshold", [0, -1]),
        ([31, 31, -31, 49, 49, 49], "threshold", [0, 0, 0, 1, 1, 1]),
    ],
)
def test_magnitude_at_the_threshold_has_code_0(
    group: list[float], method: str, counted: list[int], factor: float
) -> None:
    """Where float64 can tell, a tie is one: no division may round before the comparison."""
    w = np.array([group]) * factor
    expected = np.array([counted]) * (factor > 2.0**-24)
    for codes, _ in (
        oracle.ternarize(w, len(group), method),
        ternarize(w, len(group), method),
        ternarize(torch.from_numpy(w), len(group), method),
    ):
        assert np.array_equal(np.asarray(codes), expected)


def test_ties_agree_in_all_implementations() -> None:
    """Small integers in groups whose size is no power of two: every fourth group has a tie."""
    w = RNG.integers(-6, 7, (400, 21)).astype(np.float32)
    for method in METHODS[:2]:
        for size in (3, 5, 6, 7, 21):
            want = oracle.ternarize(w, size, method)
            for got in (ternarize(w, size, method), ternarize(torch.from_numpy(w), size, method)):
                assert all(np.array_equal(np.asarray(g), t) for g, t in zip(got, want, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 0), (0, 5)])
def test_group_wider_than_the_row(shape: tuple[int, ...], method: str) -> None:
    """Two thousand million places a row would not fit into memory."""
    w, wide = grid(*shape), 2**31
    want = oracle.ternarize(w, wide, method)
    for given in (w, torch.from_numpy(w)):
        got = ternarize(given, wide, method)
        assert all(np.array_equal(np.asarray(g), t) for g, t in zip(got, want, strict=True))
        assert tuple(got.scales.shape) == (shape[0], min(shape[1], 1))
        values = np.asarray(dequantize(*got, wide))
        assert np.array_equal(values, oracle.dequantize(*want, wide))


@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 2.0**-22, 2.0**-40, 2.0**13, 2.0**20])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group_size", [1, 16, 128])
def test_quantisation_is_idempotent(factor: float, method: str, group_size: int) -> None:
    once = ternarize(grid(4, 300) * np.float32(factor), group_size, method)
    assert np.isfinite(once.scales).all()
    twice = ternarize(dequantize(*once, group_size), group_size, method)
    assert np.array_equal(once.codes, twice.codes)
    assert np.array_equal(once.scales, twice.scales)


@pytest.mark.parametrize(
    ("method", "error", "zeros"),
    [("absmean", 0.2105, 0.309), ("threshold", 0.1880, 0.463), ("lstsq", 0.1872, 0.457)],
)
def test_error_on_normal_weights(method: str, error: float, zeros: float) -> None:
    """The figures of the documentation."""
    w = np.random.default_rng(0).standard_normal((400, 1280))
    codes, scales = ternarize(w, 128, method)
    assert oracle.squared_error(w, dequantize(codes, scales)) == pytest.approx(error, abs=0.001)
    assert np.mean(codes == 0) == pytest.approx(zeros, abs=0.003)


def test_published_scale_is_worse_and_not_idempotent() -> None:
    """The mean over all weights, not over the coded ones: 0.261, and it shrinks each time."""
    w = np.random.default_rng(0).standard_normal((400, 1280))
    codes, _ = ternarize(w, 128, "absmean")
    values = codes * np.abs(w).reshape(400, 10, 128).mean(-1).repeat(128, axis=1)
    assert oracle.squared_error(w, values) == pytest.approx(0.261, abs=0.001)
    again = np.abs(values).reshape(400, 10, 128).mean(-1)
    assert np.mean(again / np.abs(values).reshape(400, 10, 128).max(-1)) < 0.75


def test_least_squares_is_optimal() -> None:
    """Against every one of the 3⁶ choices of codes, each with its own best scale."""
    codes = np.array(np.meshgrid(*[[-1, 0, 1]] * 6)).reshape(6, -1).T
    used = np.maximum(np.count_nonzero(codes, axis=1), 1)
    for w in RNG.standard_normal((20, 6)):
        best_scales = codes @ w / used
        least = np.min(np.sum((w - best_scales[:, None] * codes) ** 2, axis=1))
        values = dequantize(*ternarize(w, 6, "lstsq"), 6)
        assert np.sum((w - values) ** 2) <= least * (1 + 1e-3) + 1e-6


def test_extreme_groups_have_finite_scales() -> None:
    largest = np.finfo(np.float64).max
    w = np.stack([np.zeros(8), np.full(8, 1e6), np.full(8, 1e-9), np.full(8, -largest)])
    made = [
        quantise(w, 8, method) for method in METHODS for quantise in (ternarize, oracle.ternarize)
    ]
    made += [ternarize(torch.from_numpy(w), 8, method) for method in METHODS]
    for codes, scales in made:
        assert codes[:, 0].tolist() == [0, 1, 0, -1]
        assert scales[:, 0].tolist() == [0.0, 65504.0, 0.0, 65504.0]


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (DTypeError, (np.ones(4, dtype=np.int64),)),
        (DTypeError, ([1.0, 2.0],)),
        (ShapeError, (np.array(1.0),)),
        (RangeError, (np.array([1.0, np.nan]),)),
        (RangeError, (np.ones(4), 0)),
        (DTypeError, (np.ones(4), 2.0)),
        (RangeError, (np.ones(4), 2, "absmax")),
    ],
)
def test_invalid_arguments_raise(error: type[Exception], arguments: tuple[object, ...]) -> None:
    with pytest.raises(error):
        ternarize(*arguments)


@pytest.mark.parametrize(
    ("error", "codes", "scales"),
    [
        (DTypeError, np.ones((2, 8), dtype=np.int32), np.ones((2, 1), dtype=np.float16)),
        (DTypeError, np.ones((2, 8), dtype=np.int8), np.ones((2, 1), dtype=np.float32)),
        (ShapeError, np.ones((2, 8), dtype=np.int8), np.ones((2, 2), dtype=np.float16)),
        (ShapeError, np.ones((2, 8), dtype=np.int8), np.ones((1, 1), dtype=np.float16)),
    ],
)
def test_dequantize_rejects_invalid_arguments(
    error: type[Exception], codes: np.ndarray, scales: np.ndarray
) -> None:
    with pytest.raises(error):
        dequantize(codes, scales)
