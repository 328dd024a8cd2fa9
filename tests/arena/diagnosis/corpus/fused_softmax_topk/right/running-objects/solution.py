"""Softmax fused with top-k in one pass: running objects absorb tiles of a block of rows."""

import numpy as np

TILE_ELEMENTS = 1 << 15
TILE_COLUMNS = 2048


class RunningTotal:
    """Largest logit so far and the sum of exp(logit - largest), for every row of a block."""

    def __init__(self, rows):
        self.largest = np.full(rows, -np.inf)
        self.total = np.zeros(rows)

    def absorb(self, tile):
        peak = tile.max(axis=1)
        if not np.all(peak < np.inf):  # the maximum of a row with NaN is NaN
            raise ValueError("logits contain NaN or +inf")
        largest = np.maximum(self.largest, peak)
        anchor = np.where(largest > -np.inf, largest, 0.0)
        self.total *= np.exp(self.largest - anchor)
        self.total += np.exp(tile - anchor[:, None]).sum(axis=1)
        self.largest = largest

    def probabilities(self, logits):
        if np.any(self.largest == -np.inf):
            raise ValueError("a row is all -inf")
        return np.exp(logits - self.largest[:, None]) / self.total[:, None]


class RunningBest:
    """The k best (logit, index) so far, best first, for every row of a block."""

    def __init__(self, rows, k):
        self.k = k
        self.values = np.empty((rows, 0))
        self.places = np.empty((rows, 0), dtype=np.int64)

    def absorb(self, tile, start):
        if self.values.shape[1] == self.k and not np.any(tile > self.values[:, -1:]):
            return
        places = np.broadcast_to(np.arange(start, start + tile.shape[1]), tile.shape)
        values = np.concatenate([self.values, tile], axis=1)
        places = np.concatenate([self.places, places], axis=1)
        # Earlier columns stand to the left, so a stable sort keeps the lower index first.
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.k]
        self.values = np.take_along_axis(values, order, axis=1)
        self.places = np.take_along_axis(places, order, axis=1)


class Block:
    """Some rows of the logits, walked through tile by tile."""

    def __init__(self, logits, k):
        self.logits = logits
        self.total = RunningTotal(len(logits))
        self.best = RunningBest(len(logits), k)

    def tiles(self):
        for start in range(0, self.logits.shape[1], TILE_COLUMNS):
            yield start, self.logits[:, start : start + TILE_COLUMNS].astype(np.float64)

    def run(self):
        with np.errstate(over="ignore", under="ignore"):
            for start, tile in self.tiles():
                self.total.absorb(tile)
                self.best.absorb(tile, start)
            return self.total.probabilities(self.best.values), self.best.places


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    if not isinstance(logits, np.ndarray) or logits.dtype.type not in (
        np.float16,
        np.float32,
        np.float64,
    ):
        raise TypeError("logits must be an array of float16, float32 or float64")
    if logits.ndim != 2:
        raise ValueError(f"logits must have rank 2, not {logits.ndim}")
    rows, columns = logits.shape
    if not 1 <= k <= columns:
        raise ValueError(f"k is {k}, it must be from 1 to {columns}")
    probs = np.empty((rows, k), dtype=logits.dtype)
    indices = np.empty((rows, k), dtype=np.int64)
    height = max(1, TILE_ELEMENTS // (min(columns, TILE_COLUMNS) + k))
    for top in range(0, rows, height):
        bottom = min(top + height, rows)
        probs[top:bottom], indices[top:bottom] = Block(logits[top:bottom], k).run()
    return probs, indices
