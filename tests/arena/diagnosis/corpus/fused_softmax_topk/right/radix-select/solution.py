"""Softmax fused with top-k, by radix selection.

Every block of rows is swept strip by strip, always reading the logits afresh:

1. the largest logit of each row (and the refusal of rows that have no softmax);
2. one sweep per byte of the dtype: the k-th largest logit, found byte by byte as an integer key;
3. the k entries at or above that key, in the order of their indices;
4. the sum of the exponentials over the whole vocabulary.
"""

import operator
from collections.abc import Iterator

import numpy as np

TILE_ENTRIES = 1 << 14
MAX_BLOCK_ROWS = 64
DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS


def softmax_topk(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits = np.asarray(logits)
    k = _checked_count(logits, k)
    n_rows, vocabulary = logits.shape

    probs = np.empty((n_rows, k), dtype=logits.dtype)
    indices = np.empty((n_rows, k), dtype=np.int64)
    block_rows = min(MAX_BLOCK_ROWS, max(1, TILE_ENTRIES // vocabulary))
    for first in range(0, n_rows, block_rows):
        rows = slice(first, first + block_rows)
        probs[rows], indices[rows] = _block_topk(logits[rows], k)
    return probs, indices


def _checked_count(logits: np.ndarray, k: int) -> int:
    """k as an int, or an exception if k or the array cannot be answered."""
    if logits.ndim != 2:
        raise ValueError(f"logits must have 2 axes, not {logits.ndim}")
    if logits.dtype.kind != "f" or logits.dtype.itemsize not in (2, 4, 8):
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    k = operator.index(k)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must lie in 1..{logits.shape[1]}, not {k}")
    return k


def _block_topk(block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (float64) and indices of a few rows, best first."""
    peak = _row_peaks(block)
    threshold, quota = _kth_largest_key(block, k)
    values, places = _gather(block, k, threshold, quota)
    total = _sum_of_exponentials(block, peak)

    with np.errstate(over="ignore"):
        probabilities = np.exp(values - peak[:, None]) / total[:, None]
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(probabilities, order, 1), np.take_along_axis(places, order, 1)


def _strips(block: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Views of a block that together cover all its columns, each with its first column."""
    width = max(1, TILE_ENTRIES // block.shape[0])
    for start in range(0, block.shape[1], width):
        yield start, block[:, start : start + width]


def _row_peaks(block: np.ndarray) -> np.ndarray:
    """The largest logit of each row, in float64; refuses NaN, +inf and rows of -inf only."""
    peak = np.full(block.shape[0], -np.inf)
    for _, strip in _strips(block):
        np.maximum(peak, strip.max(axis=1), out=peak)  # a NaN stays a NaN
    if not np.isfinite(peak).all():
        raise ValueError("a row contains NaN or +inf, or nothing but -inf")
    return peak


def _sum_of_exponentials(block: np.ndarray, peak: np.ndarray) -> np.ndarray:
    """The sum of exp(logit - peak) of each row, in float64."""
    total = np.zeros(block.shape[0])
    for _, strip in _strips(block):
        gap = strip.astype(np.float64)
        with np.errstate(over="ignore"):
            gap -= peak[:, None]
        total += np.exp(gap, out=gap).sum(axis=1)
    return total


def _sort_keys(strip: np.ndarray) -> np.ndarray:
    """Unsigned integers that are ordered as the floats are, with -0 equal to +0."""
    floats = strip.astype(strip.dtype.newbyteorder("="), order="C") + 0.0  # -0 + 0 is +0
    bits = floats.view(f"u{floats.itemsize}")
    sign = bits.dtype.type(1 << (8 * floats.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _kth_largest_key(block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The key of each row's k-th largest logit, and how many of its equals are among the k."""
    n_rows = block.shape[0]
    key_type = np.dtype(f"u{block.itemsize}").type
    row_number = np.arange(n_rows)
    threshold = np.zeros(n_rows, dtype=key_type)
    wanted = np.full(n_rows, k)
    for shift in range(8 * block.itemsize - DIGIT_BITS, -1, -DIGIT_BITS):
        histogram = np.zeros((n_rows, BINS), dtype=np.int64)
        for _, strip in _strips(block):
            keys = _sort_keys(strip)
            digits = (keys >> key_type(shift)) & key_type(BINS - 1)
            differs = ((keys ^ threshold[:, None]) >> key_type(shift)) >> key_type(DIGIT_BITS)
            cells = digits.astype(np.intp) + BINS * row_number[:, None]
            counts = np.bincount(cells[differs == 0], minlength=n_rows * BINS)
            histogram += counts.reshape(n_rows, BINS)
        from_top = np.cumsum(histogram[:, ::-1], axis=1)
        step = np.argmax(from_top >= wanted[:, None], axis=1)
        digit = BINS - 1 - step
        wanted -= from_top[row_number, step] - histogram[row_number, digit]
        threshold |= digit.astype(key_type) << key_type(shift)
    return threshold, wanted


def _gather(
    block: np.ndarray, k: int, threshold: np.ndarray, quota: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (float64) and indices of each row's k best, in the order of their indices.

    `quota` says how many entries equal to the threshold belong to the k: the first ones.
    """
    n_rows = block.shape[0]
    values = np.full((n_rows, k), -np.inf)
    places = np.zeros((n_rows, k), dtype=np.int64)
    filled = np.zeros(n_rows, dtype=np.int64)
    equals_seen = np.zeros(n_rows, dtype=np.int64)
    for start, strip in _strips(block):
        keys = _sort_keys(strip)
        equal = keys == threshold[:, None]
        equal_rank = equals_seen[:, None] + np.cumsum(equal, axis=1)
        taken = (keys > threshold[:, None]) | (equal & (equal_rank <= quota[:, None]))
        row, column = np.nonzero(taken)
        slot = filled[row] + np.cumsum(taken, axis=1)[row, column] - 1
        values[row, slot] = strip[row, column]
        places[row, slot] = start + column
        filled += taken.sum(axis=1)
        equals_seen += equal.sum(axis=1)
    return values, places
