"""Softmax fused with top-k: find each row's k-th largest logit first, then gather.

Two sweeps over tiles of the matrix. The first one keeps only the k largest *values* of every row
and so knows the row's maximum and its threshold (the k-th largest logit). The second one adds up
exp(logit - maximum) and collects the positions of the entries that made it.
"""

import numpy as np

TILE = 1 << 14          # float64 elements of a tile (128 KiB), unless k alone is wider
DTYPES = (np.float16, np.float32, np.float64)


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits = np.asarray(logits)
    _check(logits, k)
    count, vocab = logits.shape
    probs = np.empty((count, k), logits.dtype)
    indices = np.empty((count, k), np.int64)

    width = min(vocab, max(TILE, k))
    height = max(1, TILE // width)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for low in range(0, count, height):
            rows = slice(low, low + height)
            probs[rows], indices[rows] = _block(logits[rows], k, width)
    return probs, indices


def _check(logits, k):
    if logits.dtype.type not in DTYPES:
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have two axes, not {logits.ndim}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in [1, {logits.shape[1]}], not {k}")


def _tiles(block, width):
    """(first column, private float64 copy) of every tile of a few rows."""
    for start in range(0, block.shape[1], width):
        yield start, block[:, start:start + width].astype(np.float64, order="C")


def _block(block, k, width):
    """(probabilities in float64, indices) of a few rows."""
    best = _largest(block, k, width)
    peak = best.max(axis=1, keepdims=True)
    if not np.isfinite(peak).all():
        raise ValueError("a row of logits holds NaN or +inf, or nothing but -inf")
    threshold = best.min(axis=1, keepdims=True)
    quota = k - np.count_nonzero(best > threshold, axis=1)[:, None]

    height = block.shape[0]
    values = np.empty((height, k))
    indices = np.empty((height, k), np.int64)
    total = np.zeros((height, 1))
    filled = np.zeros((height, 1), np.int64)        # entries gathered so far
    equals = np.zeros((height, 1), np.int64)        # entries equal to the threshold seen so far
    for start, tile in _tiles(block, width):
        level = tile == threshold
        rank = np.cumsum(level, axis=1) + equals
        equals = rank[:, -1:].copy()
        level &= rank <= quota
        taken = (tile > threshold) | level

        row, column = np.nonzero(taken)
        place = np.cumsum(taken, axis=1) + filled
        values[row, place[row, column] - 1] = tile[row, column]
        indices[row, place[row, column] - 1] = column + start
        filled = place[:, -1:].copy()

        tile -= peak
        np.exp(tile, out=tile)
        total += tile.sum(axis=1, keepdims=True)

    # The entries stand in order of their index, so a stable sort settles equal logits.
    order = np.argsort(-values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, axis=1)
    indices = np.take_along_axis(indices, order, axis=1)
    return np.exp(values - peak) / total, indices


def _largest(block, k, width):
    """The k largest logits of every row, in no order; a NaN counts as the largest of all."""
    best = np.empty((block.shape[0], 0))
    for _, tile in _tiles(block, width):
        pool = np.concatenate((best, tile), axis=1)
        pool.partition(pool.shape[1] - k, axis=1)
        best = pool[:, -k:].copy()
    return best
