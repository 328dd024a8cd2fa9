"""Two passes over the keys: the first finds each row's log-sum-exp, the second sums the values."""

import math

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Softmax attention in O(N) memory; scores are computed twice, nothing is rescaled."""
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError("q, k, v need axes (batch, head, position, width)")
    if any(x.dtype not in (np.float32, np.float64) for x in (q, k, v)):
        raise TypeError("q, k, v must be float32 or float64")
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if k.shape != (batch, groups, keys, width) or v.shape != k.shape:
        raise ValueError("k and v do not fit q")
    if heads % groups:
        raise ValueError("query heads must be a multiple of key heads")
    if tile <= 0:
        raise ValueError("tile must be positive")

    out = np.empty_like(q, order="C")
    lse = np.empty(q.shape[:3], q.dtype)
    share = heads // groups
    for b in range(batch):
        for g in range(groups):
            for h in range(g * share, (g + 1) * share):
                for lo in range(0, queries, tile):
                    hi = min(lo + tile, queries)
                    block = _Block(
                        q[b, h, lo:hi], k[b, g], v[b, g], lo + keys - queries, causal, tile
                    )
                    lse[b, h, lo:hi] = block.log_sum_exp()
                    out[b, h, lo:hi] = block.weighted_values(lse[b, h, lo:hi])
    return out, lse


class _Block:
    """The scores of some queries, made anew for each pass."""

    def __init__(self, q, k, v, offset, causal, tile):
        self.q, self.k, self.v = q, k, v
        self.offset, self.causal, self.tile = offset, causal, tile
        self.scale = 1.0 / math.sqrt(q.shape[1])

    def scores(self):
        """(start, stop, scores) per tile of keys that any of the queries sees."""
        rows = len(self.q)
        limit = min(len(self.k), self.offset + rows) if self.causal else len(self.k)
        for start in range(0, max(limit, 0), self.tile):
            stop = min(start + self.tile, limit)
            s = (self.q @ self.k[start:stop].T) * self.scale
            if self.causal:
                last = self.offset + np.arange(rows)
                s[np.arange(start, stop)[None, :] > last[:, None]] = -np.inf
            yield start, stop, s

    def log_sum_exp(self):
        """By pairwise merging: logaddexp of each tile's own log-sum-exp."""
        total = np.full(len(self.q), -np.inf, self.q.dtype)
        for _, _, s in self.scores():
            top = s.max(axis=1)
            safe = np.where(np.isneginf(top), 0, top)
            mass = np.exp(s - safe[:, None]).sum(axis=1)
            mine = np.full_like(total, -np.inf)
            np.log(mass, out=mine, where=mass > 0)
            total = np.logaddexp(total, mine + safe)
        return total

    def weighted_values(self, lse):
        result = np.zeros_like(self.q, order="C")
        shift = np.where(np.isneginf(lse), 0, lse)[:, None]
        for start, stop, s in self.scores():
            result += np.exp(s - shift) @ self.v[start:stop]
        return result
