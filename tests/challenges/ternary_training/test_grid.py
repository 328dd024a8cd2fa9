"""Weights of the checks: their sums are the same in every order of summation."""

import numpy as np
import pytest

from trapline.challenges.ternary_training.situations import clear_cut, grid


def by_share(w, factor):
    """A right answer that divides by the largest weight before it takes means."""
    magnitude = np.abs(w.astype(np.float64))
    largest = magnitude.max(axis=-1, keepdims=True)
    relative = magnitude / largest
    counts = relative > factor * relative.mean(axis=-1, keepdims=True)
    scales = (relative * counts).sum(axis=-1) / counts.sum(axis=-1) * largest[..., 0]
    return counts, scales.astype(np.float16)


@pytest.mark.parametrize("factor", [0.5, 0.7, 0.75, 0.8])
def test_rounding_decides_nothing(factor):
    """It depends on how an array lies in memory."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        groups = clear_cut(rng, 12, 160).T
        pairs = zip(by_share(groups, factor), by_share(groups.copy(), factor), strict=True)
        assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("weights", [grid, clear_cut])
def test_sums_are_exact_in_float32(weights):
    w = np.abs(weights(np.random.default_rng(0), 40, 300))
    for order in (slice(None), slice(None, None, -1)):
        added = np.cumsum(w[:, order], axis=-1, dtype=np.float32)[:, -1]
        assert np.array_equal(added, w.astype(np.float64).sum(axis=-1))
