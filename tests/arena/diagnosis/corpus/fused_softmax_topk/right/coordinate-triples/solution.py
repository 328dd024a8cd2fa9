"""Softmax fused with top-k: one sweep over tiles, candidates kept as (row, column, value) triples.

A band of rows is swept from left to right, one tile of columns at a time.  A tile does two things:

* it adds its exponentials to the running denominator of each row (online softmax), and
* it hands over the few entries that can still be among the best k.  They are flat lists of
  coordinates, so that one sort serves all rows of the band.

A band has so few rows that neither a tile nor the held candidates of a band outgrow `TILE` entries
(or, where k alone is larger, k entries).
"""

import operator
from typing import NamedTuple

import numpy as np

TILE = 1 << 13  # logits looked at in one go: 64 KiB as float64
INF = np.inf


class Triples(NamedTuple):
    """Entries of a band in coordinates; `row` counts within the band, `col` within the whole row."""

    row: np.ndarray
    col: np.ndarray
    value: np.ndarray


def softmax_topk(logits, k):
    """(probs, indices), both (N, k): the k largest logits of each row, best first, equal ones by index."""
    logits = np.asarray(logits)
    k = _checked(logits, k)
    n_rows, n_cols = logits.shape
    probs = np.empty((n_rows, k), dtype=logits.dtype)
    indices = np.empty((n_rows, k), dtype=np.int64)
    width = min(n_cols, TILE)
    height = max(1, TILE // max(width, k))
    # Far-away logits overflow to a distance of -inf, whose exponential is the right 0: no warnings wanted.
    with np.errstate(all="ignore"):
        for top in range(0, n_rows, height):
            band = slice(top, top + height)
            probs[band], indices[band] = _solve_band(logits[band], k, width)
    return probs, indices


def _checked(logits, k):
    """k as an int; raises for whatever the contract does not admit, except for the values of `logits`."""
    if logits.dtype.type not in (np.float16, np.float32, np.float64):
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have rank 2, not {logits.ndim}")
    k = operator.index(k)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must lie in 1..{logits.shape[1]}, not {k}")
    return k


def _solve_band(band, k, width):
    """Probabilities (float64) and columns of the best k of every row of a band."""
    n_rows, n_cols = band.shape
    peak = np.full(n_rows, -INF)  # largest logit so far
    total = np.zeros(n_rows)  # sum of exp(logit - peak) so far
    nothing = np.empty(0, dtype=np.int64)
    held = Triples(nothing, nothing, np.empty(0))
    for left in range(0, n_cols, width):
        # A copy of our own, C-ordered so that sums run pairwise along rows; overwritten below.
        tile = band[:, left:left + width].astype(np.float64, order="C")
        tile_peak = tile.max(axis=1)
        if not (tile_peak < INF).all():  # a NaN compares false as well
            raise ValueError("logits contain NaN or +inf")

        worst = held.value.reshape(n_rows, -1)[:, -1:] if left >= k else None
        held = _merge(held, _candidates(tile, left, k, worst), k, n_rows)

        old_peak, peak = peak, np.maximum(peak, tile_peak)
        shift = np.where(peak == -INF, 0.0, peak)  # nothing but -inf so far: exp(-inf - 0) = 0
        total *= np.exp(old_peak - shift)
        tile -= shift[:, None]
        total += np.exp(tile, out=tile).sum(axis=1)
    if (peak == -INF).any():
        raise ValueError("a row of logits is all -inf")
    value = held.value.reshape(n_rows, k)
    probs = np.exp(value - peak[:, None]) / total[:, None]
    return probs, held.col.reshape(n_rows, k)


def _candidates(tile, left, k, worst):
    """The entries of a tile that may be among the best k of their rows, in row-major order.

    `worst` (rows, 1) is the k-th best of the columns further left, None while there are fewer than k.
    An entry equal to it has the higher index and loses.
    """
    width = tile.shape[1]
    if width > k:
        kth = np.partition(tile, width - k, axis=1)[:, width - k]
        keep = tile >= kth[:, None]
    else:
        keep = np.ones(tile.shape, dtype=bool)
    if worst is not None:
        keep &= tile > worst
    row, col = np.nonzero(keep)
    return Triples(row, col + left, tile[keep])


def _merge(held, fresh, k, n_rows):
    """The best k (or all, if fewer) of every row, sorted by row and then from best to worst.

    `fresh` lies to the right of `held`, and either has equal values of a row in the order of columns.
    The sort is stable, so equals stay in that order.
    """
    row, col, value = (np.concatenate(pair) for pair in zip(held, fresh))
    order = np.lexsort((-value, row))
    row = row[order]
    counts = np.bincount(row, minlength=n_rows)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    best = rank < k
    order = order[best]
    return Triples(row[best], col[order], value[order])
