"""Softmax fused with top-k, one pass over the logits, nothing of size N x V.

Rows are taken in blocks and each block in tiles of at most TILE numbers. Two small objects watch
the tiles go by: a `_Normaliser`, which knows the running maximum and the running sum of
exponentials of every row, and a `_Pool`, which holds the best entries so far.

The pool is kept in the order of the columns, not in the order of rank. New tiles are appended on
its right, so "left of" always means "lower index", and a cut through a group of equal logits has to
do no more than keep the leftmost ones. The pool is ranked once, at the very end.
"""

import operator

import numpy as np

TILE = 8192  # numbers of one tile of work, 64 KiB in float64


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V): the k largest logits of each row, best first.

    `probs` are softmax probabilities over all V entries in the dtype of `logits`, `indices` are
    int64. Equal logits are ranked by index. Raises ValueError or TypeError for bad input.
    """
    logits, k = _checked(logits, k)
    count, vocabulary = logits.shape
    probs = np.empty((count, k), dtype=logits.dtype)
    indices = np.empty((count, k), dtype=np.int64)
    block_rows = max(1, TILE // vocabulary)
    # Differences of huge logits may overflow to -inf and small exponentials vanish: both are right.
    with np.errstate(over="ignore", under="ignore"):
        for first in range(0, count, block_rows):
            block = slice(first, first + block_rows)
            probs[block], indices[block] = _solve_block(logits[block], k)
    return probs, indices


def _checked(logits, k):
    """The arguments as an array and an int, or the exception that they deserve."""
    logits = np.asarray(logits)
    if logits.dtype.kind != "f" or logits.dtype.itemsize > 8:
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have shape (N, V), not {logits.shape}")
    k = operator.index(k)
    if k < 1 or k > logits.shape[1]:
        raise ValueError(f"k must be between 1 and {logits.shape[1]}, not {k}")
    return logits, k


def _solve_block(block, k):
    """Probabilities (float64) and columns of the k best entries of some rows, in one pass."""
    rows, vocabulary = block.shape
    normaliser = _Normaliser(rows)
    pool = _Pool(rows, k, width=min(vocabulary, k + max(k, TILE)))
    for first in range(0, vocabulary, TILE):
        tile = np.array(block[:, first : first + TILE], dtype=np.float64, order="C")
        tops = _row_maxima(tile)
        pool.offer(tile, first)
        normaliser.absorb(tile, tops)
    if np.isneginf(normaliser.peak).any():
        raise ValueError("a row of logits is -inf throughout")
    values, columns = pool.ranked()
    return normaliser.probabilities(values), columns


def _row_maxima(tile):
    """The largest number of each row, shape (rows, 1); NaN wins over everything and is refused."""
    tops = tile.max(axis=1, keepdims=True)
    if not (tops < np.inf).all():
        raise ValueError("logits contain NaN or +inf")
    return tops


class _Normaliser:
    """Running maximum and running sum of exp(logit - maximum) for each row."""

    def __init__(self, rows):
        self.peak = np.full((rows, 1), -np.inf)
        self.total = np.zeros((rows, 1))

    def absorb(self, tile, tops):
        """Add a tile with the row maxima `tops`. The tile is used up as scratch space."""
        peak = np.maximum(self.peak, tops)
        # A row that is -inf so far has no scale yet, and -inf - -inf would be NaN.
        shift = np.where(np.isneginf(peak), 0.0, peak)
        self.total *= np.exp(self.peak - shift)
        tile -= shift
        np.exp(tile, out=tile)
        self.total += tile.sum(axis=1, keepdims=True)
        self.peak = peak

    def probabilities(self, values):
        """Softmax probabilities of logits of these rows, over everything absorbed."""
        return np.exp(values - self.peak) / self.total


class _Pool:
    """The best k entries so far of each row, and a margin of entries not yet compared.

    Columns ascend from left to right in each row. Filling the margin before comparing makes the
    work linear in V also for a large k.
    """

    def __init__(self, rows, k, width):
        self.k = k
        self.filled = 0
        self.values = np.empty((rows, width))
        self.columns = np.empty((rows, width), dtype=np.int64)

    def offer(self, tile, first):
        """Append a tile whose columns begin at `first`."""
        if self.filled + tile.shape[1] > self.values.shape[1]:
            self._drop_losers()
        begin, end = self.filled, self.filled + tile.shape[1]
        self.values[:, begin:end] = tile
        self.columns[:, begin:end] = np.arange(first, first + tile.shape[1])
        self.filled = end

    def ranked(self):
        """Values and columns of the k best entries, best first, equals by column."""
        self._drop_losers()
        values, columns = self.values[:, : self.k], self.columns[:, : self.k]
        order = np.argsort(-values, axis=1, kind="stable")
        return np.take_along_axis(values, order, axis=1), np.take_along_axis(columns, order, axis=1)

    def _drop_losers(self):
        """Keep the k best of each row, in column order: all above the cut, then leftmost equals."""
        if self.filled <= self.k:
            return
        values, columns = self.values[:, : self.filled], self.columns[:, : self.filled]
        place = self.filled - self.k
        cut = np.partition(values, place, axis=1)[:, place : place + 1]
        above = values > cut
        level = values == cut
        vacant = self.k - above.sum(axis=1, keepdims=True)
        keep = above | (level & (np.cumsum(level, axis=1) <= vacant))
        self.values[:, : self.k] = values[keep].reshape(-1, self.k)
        self.columns[:, : self.k] = columns[keep].reshape(-1, self.k)
        self.filled = self.k
