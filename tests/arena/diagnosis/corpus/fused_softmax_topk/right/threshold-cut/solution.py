"""Softmax fused with top-k: one streaming pass over small tiles, never an N x V array.

Every block of rows carries four things from tile to tile: the running maximum, the sum of
exponentials relative to that maximum, and the best k entries so far (logit and column), kept
in column order.  A merge finds the k-th largest logit of "kept + tile" with a partition, takes
everything above that threshold, and fills up with the leftmost entries equal to it.  Ranking by
value is postponed to the very end, where a stable sort of k entries does it.
"""

import operator

import numpy as np

# Cells of a work tile; at some 40 bytes of temporaries a cell this stays below a megabyte.
_TILE_CELLS = 16_384
_TILE_COLUMNS = 2_048


def softmax_topk(logits, k):
    """(probs, indices), both (N, k): the k most probable entries of every row of logits (N, V)."""
    logits, k = _checked(logits, k)
    n_rows, n_cols = logits.shape
    probs = np.empty((n_rows, k), dtype=logits.dtype)
    indices = np.empty((n_rows, k), dtype=np.int64)

    # A tile at least as wide as k keeps the number of merges at V / k; O(k) extra is allowed.
    width = min(n_cols, max(_TILE_COLUMNS, k))
    height = max(1, _TILE_CELLS // (width + min(k, width)))
    with np.errstate(all="ignore"):
        for top in range(0, n_rows, height):
            rows = slice(top, min(top + height, n_rows))
            probs[rows], indices[rows] = _block_topk(logits[rows], k, width)
    return probs, indices


def _checked(logits, k):
    """The arguments as an array and an int, or ValueError / TypeError."""
    logits = np.asarray(logits)
    if logits.dtype.kind != "f" or logits.dtype.itemsize not in (2, 4, 8):
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have rank 2, not {logits.ndim}")
    k = operator.index(k)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in [1, {logits.shape[1]}], not {k}")
    return logits, k


def _block_topk(block, k, width):
    """(probs in float64, columns) of a few rows."""
    n_rows, n_cols = block.shape
    peak = np.full(n_rows, -np.inf)
    total = np.zeros(n_rows)
    kept = np.empty((n_rows, 0))
    where = np.empty((n_rows, 0), dtype=np.int64)
    floor = np.full(n_rows, -np.inf)

    for left in range(0, n_cols, width):
        tile = block[:, left:left + width].astype(np.float64)
        tile_peak = tile.max(axis=1)
        if not (tile_peak < np.inf).all():
            raise ValueError("logits contain NaN or +inf")

        # An entry that only equals the k-th best so far stands further right, and loses.
        if kept.shape[1] < k or (tile_peak > floor).any():
            kept, where = _merge(kept, where, tile, left, k)
            floor = kept.min(axis=1)

        new_peak = np.maximum(peak, tile_peak)
        anchor = np.where(new_peak == -np.inf, 0.0, new_peak)  # -inf - -inf would be NaN
        total *= np.exp(peak - anchor)
        tile -= anchor[:, None]
        total += np.exp(tile, out=tile).sum(axis=1)
        peak = new_peak

    if (peak == -np.inf).any():
        raise ValueError("a row of logits is all -inf")

    order = np.argsort(-kept, axis=1, kind="stable")
    best = np.take_along_axis(kept, order, axis=1)
    columns = np.take_along_axis(where, order, axis=1)
    return np.exp(best - peak[:, None]) / total[:, None], columns


def _merge(kept, where, tile, left, k):
    """The min(k, all) best of kept and tile in column order, as (logits, columns)."""
    n_rows, n_kept = kept.shape
    pool = np.concatenate([kept, tile], axis=1)
    size = pool.shape[1]
    if size <= k:
        picked = np.broadcast_to(np.arange(size), (n_rows, size))
    else:
        picked = _leftmost_largest(pool, k)
    # Places in the pool become columns of the row: the tile's by offset, the kept ones by lookup.
    columns = picked + (left - n_kept)
    if n_kept:
        old = np.take_along_axis(where, np.minimum(picked, n_kept - 1), axis=1)
        columns = np.where(picked < n_kept, old, columns)
    return np.take_along_axis(pool, picked, axis=1), columns


def _leftmost_largest(pool, k):
    """Places (rows, k), ascending, of the k largest of each row; of equals the leftmost."""
    n_rows, size = pool.shape
    threshold = np.partition(pool, size - k, axis=1)[:, size - k, None]
    chosen = pool > threshold
    vacancies = k - chosen.sum(axis=1, keepdims=True)
    ties = pool == threshold
    ties &= np.cumsum(ties, axis=1, dtype=np.int32) <= vacancies
    chosen |= ties
    return np.nonzero(chosen)[1].reshape(n_rows, k)
