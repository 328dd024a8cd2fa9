"""Softmax fused with top-k: one pass over tiles of a few rows and a few thousand columns."""

import numpy as np

TILE_COLUMNS = 4096
TILE_ELEMENTS = 16384
DTYPES = (np.float16, np.float32, np.float64)


def _check(logits, k):
    if logits.ndim != 2:
        raise ValueError("logits must have shape (N, V)")
    if logits.dtype not in DTYPES:
        raise TypeError("logits must be float16, float32 or float64")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError("k must be between 1 and V")


def _tile_shape(rows, columns, k):
    """Rows and columns of a tile; never narrower than k, so that the first tile holds k entries."""
    width = min(columns, max(TILE_COLUMNS, k))
    return max(1, min(rows, TILE_ELEMENTS // width)), width


def _tile_maximum(tile):
    """The maximum of every row (r, 1); refuses NaN and +inf."""
    maximum = tile.max(axis=1, keepdims=True)
    if np.isnan(maximum).any() or np.isposinf(maximum).any():
        raise ValueError("logits contain NaN or +inf")
    return maximum


def _tile_candidates(tile, k):
    """Values and columns of the k best entries of every row, in the order of their columns."""
    width = tile.shape[1]
    if k >= width:
        columns = np.broadcast_to(np.arange(width), tile.shape)
        return tile, columns
    threshold = np.partition(tile, width - k, axis=1)[:, width - k, None]
    chosen = tile > threshold
    equal = tile == threshold
    missing = k - chosen.sum(axis=1, keepdims=True)
    chosen |= equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= missing)
    columns = np.nonzero(chosen)[1].reshape(-1, k)
    return np.take_along_axis(tile, columns, axis=1), columns


def _merge(best_values, best_indices, values, indices, k):
    """The k best of both, best first; the first pair holds the lower indices."""
    values = np.concatenate([best_values, values], axis=1)
    indices = np.concatenate([best_indices, indices], axis=1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(indices, order, axis=1)


def _update_sum(running_max, running_sum, tile, tile_max):
    """Running maximum and sum of exp(logit - maximum) after one more tile. Overwrites the tile."""
    new_max = np.maximum(running_max, tile_max)
    pivot = np.where(np.isneginf(new_max), 0.0, new_max)
    tile -= pivot
    np.exp(tile, out=tile)
    new_sum = running_sum * np.exp(running_max - pivot) + tile.sum(axis=1, keepdims=True)
    return new_max, new_sum


def _block_topk(block, k, width):
    """(probs in float64, indices) of a few rows."""
    rows, vocab = block.shape
    running_max = np.full((rows, 1), -np.inf)
    running_sum = np.zeros((rows, 1))
    best_values = np.empty((rows, 0))
    best_indices = np.empty((rows, 0), np.int64)
    for start in range(0, vocab, width):
        tile = block[:, start:start + width].astype(np.float64)
        tile_max = _tile_maximum(tile)
        if start == 0:
            values, columns = _tile_candidates(tile, k)
            best_values, best_indices = _merge(best_values, best_indices, values, columns, k)
        else:
            # An entry equal to the k-th best stands further right and loses: only larger ones matter.
            better = np.flatnonzero(tile_max[:, 0] > best_values[:, -1])
            if better.size:
                values, columns = _tile_candidates(tile[better], k)
                best_values[better], best_indices[better] = _merge(
                    best_values[better], best_indices[better], values, columns + start, k)
        running_max, running_sum = _update_sum(running_max, running_sum, tile, tile_max)
    if np.isneginf(running_max).any():
        raise ValueError("a row is all -inf")
    return np.exp(best_values - running_max) / running_sum, best_indices


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits = np.asarray(logits)
    _check(logits, k)
    rows, vocab = logits.shape
    height, width = _tile_shape(rows, vocab, k)
    probs = np.empty((rows, k), logits.dtype)
    indices = np.empty((rows, k), np.int64)
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, rows, height):
            block = slice(start, start + height)
            probs[block], indices[block] = _block_topk(logits[block], k, width)
    return probs, indices
