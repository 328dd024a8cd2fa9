"""The quantiser for NumPy arrays, all groups at once. The definition is in `oracle.py`.

The scale is rounded to float16 before the codes are final, so that training uses the stored values.
"""

from collections.abc import Callable

import numpy as np

LARGEST_SCALE = float(np.finfo(np.float16).max)
#: Of the mean magnitude; the second is best for weights from a normal distribution.
THRESHOLDS = {"absmean": 0.5, "threshold": 0.775}
METHODS = (*THRESHOLDS, "lstsq")
#: Magnitudes are multiplied by it, so that no finite weight makes a sum overflow. A power of two
#: changes no digit, and what becomes too small for one is in a group whose scale is 0, or far
#: below its threshold.
ROOM = 2.0**-64


def ternarize(w: np.ndarray, group_size: int, method: str) -> tuple[np.ndarray, np.ndarray]:
    """codes int8 like w, scales float16 (…, ceil(n / group_size))."""
    columns = w.shape[-1]
    # A group wider than the row is the row: filling it up would take memory for nothing.
    group_size = min(group_size, max(1, columns))
    magnitude = grouped(np.abs(w.astype(np.float64)) * ROOM, group_size)
    sizes = group_sizes(columns, group_size)
    counts = _choose(method)(magnitude, sizes)
    number = np.maximum(np.count_nonzero(counts, axis=-1), 1)
    means = np.sum(magnitude, axis=-1, where=counts) / number
    scales = (np.minimum(means, LARGEST_SCALE * ROOM) / ROOM).astype(np.float16)
    # A scale that rounds to zero leaves nothing to tell codes apart by.
    counts &= scales[..., None] > 0
    flags = counts.reshape(*w.shape[:-1], sizes.size * group_size)[..., :columns]
    return np.where(flags, np.sign(w), 0.0).astype(np.int8), scales


def dequantize(codes: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """code · scale of its group, float32."""
    owner = np.arange(codes.shape[-1]) // group_size
    values: np.ndarray = codes * scales.astype(np.float32)[..., owner]
    return values


def group_sizes(columns: int, group_size: int) -> np.ndarray:
    """How many weights each group of a row has: all full but perhaps the last."""
    starts = np.arange(0, columns, group_size)
    return np.minimum(columns - starts, group_size)


def grouped(values: np.ndarray, group_size: int) -> np.ndarray:
    """(…, n) → (…, groups, group_size), the last group filled up with zeros."""
    columns = values.shape[-1]
    groups = group_sizes(columns, group_size).size
    padded = np.zeros((*values.shape[:-1], groups * group_size))
    padded[..., :columns] = values
    return padded.reshape(*values.shape[:-1], groups, group_size)


Choice = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _choose(method: str) -> Choice:
    if method == "lstsq":
        return _least_squares
    factor = THRESHOLDS[method]
    return lambda magnitude, sizes: _above(factor, magnitude, sizes)


def _above(factor: float, magnitude: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Sums are compared, not means: a mean is rounded, and that would decide ties."""
    sums = np.sum(magnitude, axis=-1, keepdims=True)
    flags: np.ndarray = magnitude * sizes[:, None] > factor * sums
    return flags


def _least_squares(magnitude: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Keeping the k largest gains (their sum)² / k of the squared norm: keep the k that gains most.

    Filled-up places are zeros: they come last and gain nothing.
    """
    order = np.argsort(-magnitude, axis=-1, kind="stable")
    largest = np.maximum(magnitude.max(axis=-1, keepdims=True, initial=0.0), np.finfo(float).tiny)
    falling = np.take_along_axis(magnitude / largest, order, axis=-1)
    gains = np.cumsum(falling, axis=-1) ** 2 / np.arange(1, magnitude.shape[-1] + 1)
    best = np.argmax(gains, axis=-1) if gains.size else np.zeros(gains.shape[:-1], dtype=int)
    kept = np.arange(magnitude.shape[-1]) <= np.minimum(best, sizes - 1)[..., None]
    flags = np.zeros(magnitude.shape, dtype=bool)
    np.put_along_axis(flags, order, kept, axis=-1)
    chosen: np.ndarray = flags & (magnitude > 0)
    return chosen
