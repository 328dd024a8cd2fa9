"""Softmax fused with top-k.

Rows are read once, in strips of columns. Two small states per row survive from strip to strip:

* `_Mass`, the running log-sum-exp: the largest logit so far and the sum of exp(logit - largest);
* `_Podium`, the k best logits so far with their columns, kept in the order of the columns.

Because the podium stays in column order and always stands left of the next strip, a position in
[podium | strip] orders entries exactly as their columns do: "the lower index first" is "the further
left first", also between strips. A strip is a private float64 copy, which represents every float16,
float32 and float64 exactly.
"""

import operator

import numpy as np

TILE = 1 << 14  # entries of one tile of work: 128 KiB of float64

SUPPORTED = (np.float16, np.float32, np.float64)


class _Mass:
    """Sum of exp over everything a block of rows has shown, relative to the largest logit."""

    def __init__(self, rows):
        self.peak = np.full(rows, -np.inf)
        self.total = np.zeros(rows)

    def absorb(self, strip, tops):
        """Add a strip whose row maxima are `tops`. Overwrites the strip."""
        peak = np.maximum(self.peak, tops)
        # A row that has shown nothing but -inf is measured from 0: -inf - -inf would be NaN.
        pivot = np.where(peak == -np.inf, 0.0, peak)
        self.total *= np.exp(self.peak - pivot)
        strip -= pivot[:, None]
        np.exp(strip, out=strip)
        self.total += strip.sum(axis=1)
        self.peak = peak

    def probabilities(self, logits):
        """exp(logit) / sum of exp, for some logits of each row."""
        if np.any(self.peak == -np.inf):
            raise ValueError("a row of logits is -inf throughout")
        return np.exp(logits - self.peak[:, None]) / self.total[:, None]


class _Podium:
    """The k best entries of a block of rows so far, in the order of their columns."""

    def __init__(self, strip, k):
        """Start with the first strip, which has at least k columns."""
        self.k = k
        self.columns = _best(strip, k)
        self.logits = np.take_along_axis(strip, self.columns, axis=1)

    def absorb(self, strip, tops, start):
        """Let the strip that begins at column `start` challenge the podium."""
        # An equal newcomer stands further right and loses: only a larger logit can enter.
        rows = np.flatnonzero(tops > self.logits.min(axis=1))
        if rows.size == 0:
            return
        pool = np.concatenate([self.logits[rows], strip[rows]], axis=1)
        winners = _best(pool, self.k)
        held = np.take_along_axis(self.columns[rows], np.minimum(winners, self.k - 1), axis=1)
        self.columns[rows] = np.where(winners < self.k, held, start + winners - self.k)
        self.logits[rows] = np.take_along_axis(pool, winners, axis=1)

    def ranked(self):
        """(logits, columns), best first, equals by column."""
        order = np.argsort(-self.logits, axis=1, kind="stable")
        return (
            np.take_along_axis(self.logits, order, axis=1),
            np.take_along_axis(self.columns, order, axis=1),
        )


def _best(pool, k):
    """Positions, ascending, of the k largest entries of each row; of equals the leftmost.

    Everything above the k-th largest value is in; the places left go to the first that equal it.
    """
    cut = pool.shape[1] - k
    bar = np.partition(pool, cut, axis=1)[:, cut, None]
    above = pool > bar
    level = pool == bar
    places = k - np.count_nonzero(above, axis=1, keepdims=True)
    chosen = above | (level & (np.cumsum(level, axis=1, dtype=np.int32) <= places))
    return np.nonzero(chosen)[1].reshape(-1, k)


def _checked(logits, k):
    """The arguments as an array and an int, or ValueError / TypeError."""
    logits = np.asarray(logits)
    k = operator.index(k)
    if logits.ndim != 2:
        raise ValueError(f"logits must have rank 2, not {logits.ndim}")
    if logits.dtype.type not in SUPPORTED:
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k = {k} is not in 1..{logits.shape[1]}")
    return logits, k


def _block_topk(block, k, width):
    """(probabilities, columns) of a block of rows, read in strips of `width` columns."""
    mass = _Mass(block.shape[0])
    podium = None
    for start in range(0, block.shape[1], width):
        strip = np.array(block[:, start : start + width], dtype=np.float64, order="C")
        tops = strip.max(axis=1)
        if not np.all(tops < np.inf):  # false for NaN, too
            raise ValueError("logits contain NaN or +inf")
        if podium is None:
            podium = _Podium(strip, k)
        else:
            podium.absorb(strip, tops, start)
        mass.absorb(strip, tops)
    logits, columns = podium.ranked()
    return mass.probabilities(logits), columns


def softmax_topk(logits, k):
    """The k most probable entries of every row of `logits` (N, V), and where they stand.

    Returns `probs` (N, k) in the dtype of `logits`, best first, and `indices` (N, k), int64.
    Equal logits rank by index. Works in O(N k) memory plus one tile.
    """
    logits, k = _checked(logits, k)
    count, vocabulary = logits.shape
    probs = np.empty((count, k), dtype=logits.dtype)
    indices = np.empty((count, k), dtype=np.int64)

    width = min(vocabulary, max(TILE, k))
    step = max(1, TILE // (width + k))
    # Differences of finite logits may overflow to -inf, and their exp to 0: both are right.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for first in range(0, count, step):
            rows = slice(first, first + step)
            probs[rows], indices[rows] = _block_topk(logits[rows], k, width)
    return probs, indices
