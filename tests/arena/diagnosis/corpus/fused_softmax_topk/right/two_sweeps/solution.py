"""Softmax fused with top-k: a sweep that selects, then a sweep that sums, per block of rows."""

import numpy as np

_BUDGET = 1 << 13
_WIDTH = 1 << 9


def _tiles(block, width):
    """(first column, tile in the working precision) from left to right."""
    work = (
        np.float64
        if block.dtype.itemsize == 8
        else np.promote_types(block.dtype.newbyteorder("="), np.float32)
    )
    for lo in range(0, block.shape[1], width):
        yield lo, block[:, lo : lo + width].astype(work, order="C")


def _cut(values, k):
    """Mask of the k largest per row; among equals of the k-th the leftmost. Exactly k per row."""
    n = values.shape[1]
    if n <= k:
        return np.ones(values.shape, dtype=bool)
    bar = np.partition(values, n - k, axis=1)[:, n - k, None]
    above = values > bar
    level = values == bar
    room = k - above.sum(axis=1, keepdims=True)
    return above | (level & (np.cumsum(level, axis=1) <= room))


def _select(block, k, width):
    """Values and columns of the k best of each row, best first."""
    rows = block.shape[0]
    values = columns = None
    for lo, tile in _tiles(block, width):
        if np.isnan(tile).any() or np.isposinf(tile).any():
            raise ValueError("NaN or +inf among the logits")
        here = np.broadcast_to(np.arange(lo, lo + tile.shape[1], dtype=np.int64), tile.shape)
        if values is None:
            pool, spots = tile, here
        else:
            # The pool is kept in column order, so that leftmost means lowest index.
            pool, spots = np.hstack([values, tile]), np.hstack([columns, here])
        keep = _cut(pool, k)
        values = pool[keep].reshape(rows, -1)
        columns = spots[keep].reshape(rows, -1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(columns, order, axis=1)


def _denominator(block, peak, width):
    """Sum of exp(logit - peak) over each row, in float64."""
    total = np.zeros(peak.shape, dtype=np.float64)
    for _, tile in _tiles(block, width):
        total += np.exp(tile.astype(np.float64) - peak).sum(axis=1, keepdims=True)
    return total


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    if not isinstance(logits, np.ndarray):
        logits = np.asarray(logits)
    if logits.dtype.kind != "f" or logits.dtype.itemsize not in (2, 4, 8):
        raise TypeError("logits: float16, float32 or float64 expected")
    if logits.ndim != 2:
        raise ValueError("logits: shape (N, V) expected")
    n, v = logits.shape
    if not 1 <= k <= v:
        raise ValueError("k: 1 <= k <= V expected")

    probs = np.zeros((n, k), dtype=logits.dtype)
    indices = np.zeros((n, k), dtype=np.int64)
    width = min(v, max(_WIDTH, k))
    height = max(1, _BUDGET // width)
    with np.errstate(over="ignore", under="ignore"):
        for lo in range(0, n, height):
            block = logits[lo : lo + height]
            best, where = _select(block, k, width)
            peak = best[:, :1].astype(np.float64)
            if np.isneginf(peak).any():
                raise ValueError("a row is all -inf")
            probs[lo : lo + height] = np.exp(best - peak) / _denominator(block, peak, width)
            indices[lo : lo + height] = where
    return probs, indices
