"""Sorting by merging sorted runs, all runs of a level at once."""

import numpy as np


def sort(values: np.ndarray) -> np.ndarray:
    """A sorted copy of a vector, of the same dtype."""
    values = np.asarray(values)
    if values.ndim != 1:
        raise ValueError(f"expected a vector, got {values.ndim} axes")
    width = 1 << max(0, len(values) - 1).bit_length()
    padded = np.full(width, np.inf, values.dtype)
    padded[: len(values)] = values
    return _network(padded)[: len(values)]


def _network(values: np.ndarray) -> np.ndarray:
    """Batcher's bitonic network: its comparisons do not depend on the values."""
    size = 2
    while size <= len(values):
        pairs = values.reshape(-1, size)
        flipped = pairs[:, size // 2 :][:, ::-1]
        first = pairs[:, : size // 2]
        low, high = np.minimum(first, flipped), np.maximum(first, flipped)
        pairs[:, : size // 2], pairs[:, size // 2 :] = low, high[:, ::-1]
        _clean(values, size // 2)
        size *= 2
    return values


def _clean(values: np.ndarray, size: int) -> None:
    """Sorts bitonic runs of this size in place."""
    while size > 1:
        runs = values.reshape(-1, 2, size // 2)
        low = np.minimum(runs[:, 0], runs[:, 1])
        runs[:, 1] = np.maximum(runs[:, 0], runs[:, 1])
        runs[:, 0] = low
        size //= 2


def inversions(values: np.ndarray) -> int:
    """How many pairs stand in the wrong order."""
    values = np.asarray(values)
    return int(sum(np.count_nonzero(values[:i] > values[i]) for i in range(len(values))))
