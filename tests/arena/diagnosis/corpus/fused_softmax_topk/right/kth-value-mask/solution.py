"""Softmax fused with top-k: one sweep over blocks of rows and tiles of columns.

For every block of rows the sweep keeps a running maximum, a running sum of exponentials below
that maximum, and the best k entries so far, in the order of their columns. A tile joins them by
the k-th largest value: everything above it stays, and of those equal to it the first ones.
"""

import numpy as np

TILE_COLUMNS = 4096
TILE_ELEMENTS = 16384


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits = np.asarray(logits)
    check_arguments(logits, k)
    rows, vocabulary = logits.shape
    probs = np.empty((rows, k), dtype=logits.dtype)
    indices = np.empty((rows, k), dtype=np.int64)
    width = min(vocabulary, max(TILE_COLUMNS, k))
    height = max(1, TILE_ELEMENTS // width)
    for top in range(0, rows, height):
        block = slice(top, top + height)
        probs[block], indices[block] = sweep_block(logits[block], k, width)
    return probs, indices


def check_arguments(logits, k):
    """Refuse what can be refused without reading the numbers."""
    if logits.ndim != 2:
        raise ValueError(f"logits must have two axes, not {logits.ndim}")
    if logits.dtype.kind != "f" or logits.dtype.itemsize not in (2, 4, 8):
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must lie in 1 .. {logits.shape[1]}, not {k}")


def sweep_block(block, k, width):
    """The k best probabilities and columns of a block of rows, tile by tile."""
    rows, vocabulary = block.shape
    peak = np.full((rows, 1), -np.inf)
    total = np.zeros((rows, 1))
    best = np.empty((rows, 0))
    columns = np.empty((rows, 0), dtype=np.int64)
    for start in range(0, vocabulary, width):
        tile = block[:, start:start + width].astype(np.float64)
        check_tile(tile)
        peak, total = add_to_sum(peak, total, tile)
        best, columns = merge(best, columns, tile, start, k)
    if np.isneginf(peak).any():
        raise ValueError("a row is all -inf")
    order = np.argsort(-best, axis=1, kind="stable")
    best = np.take_along_axis(best, order, axis=1)
    return exp_below(best, peak) / total, np.take_along_axis(columns, order, axis=1)


def check_tile(tile):
    """Refuse NaN and +inf; both show in the maximum."""
    if not (tile.max(axis=1) < np.inf).all():
        raise ValueError("logits contain NaN or +inf")


def add_to_sum(peak, total, tile):
    """The running maximum and the sum of exponentials below it, with one more tile."""
    new_peak = np.maximum(peak, tile.max(axis=1, keepdims=True))
    tile_total = exp_below(tile, new_peak).sum(axis=1, keepdims=True)
    return new_peak, total * exp_below(peak, new_peak) + tile_total


def exp_below(values, peak):
    """exp(values - peak); 0 for a value of -inf, also where the peak is -inf itself."""
    with np.errstate(over="ignore", under="ignore"):
        shifted = values - np.where(np.isneginf(peak), 0.0, peak)
        return np.exp(shifted, out=shifted)


def merge(best, columns, tile, start, k):
    """The best k (or fewer, while there are fewer) of those kept and of the tile's."""
    rows, width = tile.shape
    if best.shape[1] == k and not (tile.max(axis=1) > best.min(axis=1)).any():
        return best, columns
    tile_columns = np.broadcast_to(np.arange(start, start + width), tile.shape)
    values = np.concatenate([best, tile], axis=1)
    places = np.concatenate([columns, tile_columns], axis=1)
    if values.shape[1] <= k:
        return values, places
    keep = mask_of_best(values, k)
    return values[keep].reshape(rows, k), places[keep].reshape(rows, k)


def mask_of_best(values, k):
    """True at the k largest of every row; of equals at the cut, the first."""
    cut = values.shape[1] - k
    kth = np.partition(values, cut, axis=1)[:, cut:cut + 1]
    above = values > kth
    level = values == kth
    room = k - above.sum(axis=1, keepdims=True)
    return above | (level & (np.cumsum(level, axis=1) <= room))
