"""The quantiser for NumPy arrays, all groups at once. The definition is in `oracle.py`.

The scale is rounded to float16 before the codes are final, so that training uses the stored values.
"""

import numpy as np

#: Weights that share a scale, by default.
GROUP = 128
LARGEST_SCALE = float(np.finfo(np.float16).max)
#: Thresholds relative to the mean magnitude; 0.775 is best for normally distributed weights.
THRESHOLDS = {"absmean": 0.5, "threshold": 0.775}
METHODS = (*THRESHOLDS, "lstsq")
#: Magnitudes are multiplied by this power of two, so that sums of finite weights stay finite. It
#: changes no digit; values that underflow are far below the threshold or in a group of scale 0.
ROOM = 2.0**-64


def ternarize(w: np.ndarray, group_size: int, method: str) -> tuple[np.ndarray, np.ndarray]:
    """codes int8 like w, scales float16 (…, ceil(n / group_size))."""
    columns = w.shape[-1]
    # A group wider than the row is cut to the row: padding it would waste memory.
    group_size = min(group_size, max(1, columns))
    magnitude = grouped(np.abs(w.astype(np.float64)) * ROOM, group_size)
    sizes = group_sizes(columns, group_size)
    least = method == "lstsq"
    counts = _least_squares(magnitude, sizes) if least else _above(method, magnitude, sizes)
    number = np.maximum(np.count_nonzero(counts, axis=-1), 1)
    means = np.sum(magnitude, axis=-1, where=counts) / number
    scales = (np.minimum(means, LARGEST_SCALE * ROOM) / ROOM).astype(np.float16)
    # A group whose scale rounds to zero has no codes.
    counts &= scales[..., None] > 0
    flags = counts.reshape(*w.shape[:-1], sizes.size * group_size)[..., :columns]
    return np.where(flags, np.sign(w), 0.0).astype(np.int8), scales


def dequantize(codes: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """code · scale of its group, float32."""
    owner = np.arange(codes.shape[-1]) // group_size
    values: np.ndarray = codes * scales.astype(np.float32)[..., owner]
    return values


def group_sizes(columns: int, group_size: int) -> np.ndarray:
    """The number of weights in each group of a row; the last may be smaller."""
    starts = np.arange(0, columns, group_size)
    return np.minimum(columns - starts, group_size)


def grouped(values: np.ndarray, group_size: int) -> np.ndarray:
    """(…, n) → (…, groups, group_size), the last group padded with zeros."""
    columns = values.shape[-1]
    groups = group_sizes(columns, group_size).size
    padded = np.zeros((*values.shape[:-1], groups * group_size))
    padded[..., :columns] = values
    return padded.reshape(*values.shape[:-1], groups, group_size)


def _above(method: str, magnitude: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Compares with sums instead of means, whose rounding would decide ties."""
    sums = np.sum(magnitude, axis=-1, keepdims=True)
    flags: np.ndarray = magnitude * sizes[:, None] > THRESHOLDS[method] * sums
    return flags


def _least_squares(magnitude: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Keeps the k largest magnitudes for the k that maximises (their sum)² / k.

    Padding is zero: it comes last and gains nothing.
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
