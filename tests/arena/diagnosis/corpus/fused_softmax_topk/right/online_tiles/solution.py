"""Softmax fused with top-k: one sweep over the logits with running statistics per row."""

import operator

import numpy as np

TILE_ELEMENTS = 8192  # 64 KiB of float64 per work array
MIN_COLUMNS = 1024


class _RowBlock:
    """Running maximum, sum of exponentials and best k entries for a block of rows."""

    def __init__(self, rows, k):
        self.rows = rows
        self.k = k
        self.peak = np.full(rows, -np.inf)
        self.total = np.zeros(rows)
        self.values = None  # (rows, k), best first, once the first tile was seen
        self.places = None

    def absorb(self, tile, start):
        """Take in a float64 tile (rows, C) that begins at column `start`. Overwrites the tile."""
        tile_peak = tile.max(axis=1)
        if np.isnan(tile_peak).any() or (tile_peak == np.inf).any():
            raise ValueError("logits must not contain NaN or +inf")
        self._rank(tile, start)
        self._accumulate(tile, tile_peak)

    def _rank(self, tile, start):
        if self.values is None:
            row, column = np.divmod(np.arange(tile.size), tile.shape[1])
            value, place = tile.ravel(), column + start
        else:
            # A later entry has a higher index, so it must be strictly better than the k-th.
            new_row, new_column = np.nonzero(tile > self.values[:, -1:])
            if new_row.size == 0:
                return
            row = np.concatenate([np.repeat(np.arange(self.rows), self.k), new_row])
            value = np.concatenate([self.values.ravel(), tile[new_row, new_column]])
            place = np.concatenate([self.places.ravel(), new_column + start])
        order = np.lexsort((place, -value, row))
        counts = np.bincount(row, minlength=self.rows)
        first = np.cumsum(counts) - counts
        chosen = order[first[:, None] + np.arange(self.k)]
        self.values = value[chosen]
        self.places = place[chosen]

    def _accumulate(self, tile, tile_peak):
        peak = np.maximum(self.peak, tile_peak)
        # Rows that saw only -inf so far: any finite shift gives exp(-inf) = 0.
        shift = np.where(peak == -np.inf, 0.0, peak)
        with np.errstate(over="ignore", under="ignore"):
            tile -= shift[:, None]
            np.exp(tile, out=tile)
            self.total *= np.exp(self.peak - shift)
        self.total += tile.sum(axis=1)
        self.peak = peak

    def finish(self):
        """(probabilities, indices) of the block, in float64 and int64."""
        if (self.peak == -np.inf).any():
            raise ValueError("a row of logits is all -inf")
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp(self.values - self.peak[:, None])
            return weights / self.total[:, None], self.places


def _checked(logits, k):
    logits = np.asarray(logits)
    if logits.ndim != 2:
        raise ValueError(f"logits must have two axes, not {logits.ndim}")
    if logits.dtype.kind != "f" or logits.dtype.itemsize > 8:
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    k = operator.index(k)
    if k < 1 or k > logits.shape[1]:
        raise ValueError(f"k must be between 1 and {logits.shape[1]}, not {k}")
    return logits, k


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits, k = _checked(logits, k)
    n, v = logits.shape
    probs = np.empty((n, k), dtype=logits.dtype)
    indices = np.empty((n, k), dtype=np.int64)
    columns = min(v, max(MIN_COLUMNS, k))
    rows = max(1, TILE_ELEMENTS // columns)
    for top in range(0, n, rows):
        bottom = min(top + rows, n)
        block = _RowBlock(bottom - top, k)
        for left in range(0, v, columns):
            tile = np.array(logits[top:bottom, left : left + columns], dtype=np.float64, order="C")
            block.absorb(tile, left)
        with np.errstate(under="ignore"):
            probs[top:bottom], indices[top:bottom] = block.finish()
    return probs, indices
