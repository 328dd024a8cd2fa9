"""Softmax fused with top-k: one sweep per row, candidates in a reservoir that is sorted only when full.

A row is read in tiles. Each tile feeds two consumers:

* the normaliser: the largest logit so far and the sum of exp(logit - largest);
* the reservoir: the entries that may still be among the best k. It has room for more than k, takes
  whatever beats the k-th best known entry, and throws the losers out only when the next tile no longer fits.

Rank order is "larger logit, then lower index". Entries enter by rising index, so a stable descending sort of
the reservoir is the rank order, however often it has been repeated.
"""

import operator

import numpy as np

TILE = 8192
FLOAT_TYPES = (np.float16, np.float32, np.float64)


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits, k = _checked(logits, k)
    height, width = logits.shape
    probs = np.empty((height, k), logits.dtype)
    indices = np.empty((height, k), np.int64)
    reservoir = Reservoir(k, width)
    with np.errstate(over="ignore", under="ignore"):
        for row, row_probs, row_indices in zip(logits, probs, indices):
            reservoir.clear()
            peak, total = _sweep(row, reservoir)
            best, row_indices[:] = reservoir.best()
            row_probs[:] = np.exp(best - peak) / total
    return probs, indices


def _checked(logits, k):
    logits = np.asarray(logits)
    k = operator.index(k)
    if logits.dtype.type not in FLOAT_TYPES:
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have rank 2, not {logits.ndim}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must lie in 1..{logits.shape[1]}, not {k}")
    return logits, k


def _sweep(row, reservoir):
    """Offer every entry of the row to the reservoir; return its largest logit and the sum of exp(logit - largest)."""
    peak, total = -np.inf, 0.0
    for start in range(0, row.size, TILE):
        tile = row[start:start + TILE].astype(np.float64)
        tile_peak = tile.max()
        if not tile_peak < np.inf:
            raise ValueError("logits must contain neither NaN nor +inf")
        reservoir.offer(tile, start)
        if tile_peak == -np.inf:
            continue
        if tile_peak > peak:
            total *= np.exp(peak - tile_peak)
            peak = tile_peak
        tile -= peak
        np.exp(tile, out=tile)
        total += tile.sum()
    if peak == -np.inf:
        raise ValueError("a row of logits is -inf throughout")
    return peak, total


class Reservoir:
    """The entries of one row that may still be among its best k."""

    def __init__(self, k, width):
        self.k = k
        capacity = min(width, 2 * k + TILE)
        self.values = np.empty(capacity, np.float64)
        self.places = np.empty(capacity, np.int64)
        self.clear()

    def clear(self):
        """Forget the row."""
        self.filled = 0
        self.floor = None

    def offer(self, tile, start):
        """Take from the tile, which begins at column `start`, what beats the k-th best known entry."""
        if self.filled + tile.size > self.values.size:
            self._compact()
        if self.floor is None:
            places = np.arange(tile.size)
        else:
            places = np.flatnonzero(tile > self.floor)
        end = self.filled + places.size
        self.values[self.filled:end] = tile[places]
        self.places[self.filled:end] = places + start
        self.filled = end

    def best(self):
        """Logits and columns of the best k, best first."""
        order = np.argsort(-self.values[:self.filled], kind="stable")[:self.k]
        return self.values[order], self.places[order]

    def _compact(self):
        values, places = self.best()
        self.filled = values.size
        self.values[:self.filled] = values
        self.places[:self.filled] = places
        self.floor = values[-1]
