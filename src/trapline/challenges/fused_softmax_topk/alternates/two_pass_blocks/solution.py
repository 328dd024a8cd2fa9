"""Two passes over blocks of rows: maxima and sums first, then the ranking, both in column tiles.

A block is a rectangle of at most ROWS × COLUMNS logits; all rows of a block advance together.
"""

import numpy as np

ROWS, COLUMNS = 16, 2048


def softmax_topk(logits, k):
    if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
        raise TypeError("logits must be a floating array")
    if logits.ndim != 2:
        raise ValueError("logits must be two-dimensional")
    n, v = logits.shape
    if k < 1 or k > v:
        raise ValueError(f"k = {k} is not in 1..{v}")
    probs = np.zeros((n, k), dtype=logits.dtype)
    indices = np.zeros((n, k), dtype=np.int64)
    for top in range(0, n, ROWS):
        block = logits[top : top + ROWS]
        maximum = _maximum(block)
        denominator = _denominator(block, maximum)
        values, where = _rank(block, k)
        with np.errstate(over="ignore"):
            shifted = values.astype(np.float64) - maximum
        probs[top : top + ROWS] = np.exp(shifted) / denominator
        indices[top : top + ROWS] = where
    return probs, indices


def _tiles(block):
    for left in range(0, block.shape[1], COLUMNS):
        yield left, block[:, left : left + COLUMNS]


def _maximum(block):
    maximum = np.full((block.shape[0], 1), -np.inf)
    for _, tile in _tiles(block):
        if not np.all(tile < np.inf):  # also False for NaN
            raise ValueError("NaN or +inf in the logits")
        np.maximum(maximum, tile.max(axis=1, keepdims=True), out=maximum)
    if np.any(np.isneginf(maximum)):
        raise ValueError("a row without a finite logit")
    return maximum


def _denominator(block, maximum):
    total = np.zeros_like(maximum)
    for _, tile in _tiles(block):
        with np.errstate(over="ignore"):
            total += np.exp(tile - maximum).sum(axis=1, keepdims=True)
    return total


def _rank(block, k):
    """Each tile is sorted whole; (−value, index) decides, so the order of merging does not."""
    values = np.empty((block.shape[0], 0), block.dtype)
    where = np.empty((block.shape[0], 0), np.int64)
    for left, tile in _tiles(block):
        own = np.broadcast_to(np.arange(left, left + tile.shape[1]), tile.shape)
        pool = np.concatenate([tile, values], axis=1)
        pool_where = np.concatenate([own, where], axis=1)
        order = np.lexsort((pool_where, -pool), axis=1)[:, :k]
        values = np.take_along_axis(pool, order, axis=1)
        where = np.take_along_axis(pool_where, order, axis=1)
    return values, where
