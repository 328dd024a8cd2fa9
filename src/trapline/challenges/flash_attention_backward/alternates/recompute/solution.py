"""Trusts nothing that was saved: statistics are computed again, in float64, for all heads at once.

`out` and `lse` are checked for shape and otherwise ignored; the row sum comes from its definition.
"""

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """out and lse; every block of queries sees the keys tile by tile."""
    problem = _Problem(q, k, v, causal, tile)
    out, lse = np.zeros(q.shape, q.dtype), np.zeros(q.shape[:3], q.dtype)
    for lo, hi in problem.query_spans():
        stats = problem.statistics(lo, hi)
        total = np.zeros((*q.shape[:2], hi - lo, q.shape[3]))
        for a, z in problem.key_spans(hi):
            total += problem.weights(lo, hi, a, z, stats) @ problem.values(a, z)
        out[:, :, lo:hi], lse[:, :, lo:hi] = total, stats
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """Three passes a block of queries: statistics, row sums, gradients."""
    problem = _Problem(q, k, v, causal, tile)
    if not dout.shape == out.shape == q.shape or lse.shape != q.shape[:-1]:
        raise ValueError("dout, out or lse does not fit q")
    if any(x.dtype.kind != "f" for x in (dout, out, lse)):
        raise TypeError("gradients must be floating point")
    dq = np.zeros(q.shape)
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    for lo, hi in problem.query_spans():
        block, upstream = problem.queries(lo, hi), dout[:, :, lo:hi].astype(float)
        stats = problem.statistics(lo, hi)
        row_sum = np.zeros((*q.shape[:2], hi - lo, 1))
        for a, z in problem.key_spans(hi):
            weights = problem.weights(lo, hi, a, z, stats)
            slopes = upstream @ problem.values(a, z).swapaxes(2, 3)
            row_sum += (weights * slopes).sum(axis=3, keepdims=True)
        for a, z in problem.key_spans(hi):
            weights = problem.weights(lo, hi, a, z, stats)
            slopes = upstream @ problem.values(a, z).swapaxes(2, 3)
            inner = weights * (slopes - row_sum)
            dq[:, :, lo:hi] += inner @ problem.keys(a, z) * problem.scale
            dk[:, :, a:z] += problem.fold(inner.swapaxes(2, 3) @ block)
            dv[:, :, a:z] += problem.fold(weights.swapaxes(2, 3) @ upstream)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


class _Problem:
    """Shapes, scale and mask of one call; slices of q, k, v as float64, per query head."""

    def __init__(self, q, k, v, causal, tile):
        if q.dtype.kind != "f" or k.dtype.kind != "f" or v.dtype.kind != "f":
            raise TypeError("floating-point arrays expected")
        if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
            raise ValueError("bad number of axes, or k and v differ")
        if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError("q and k do not fit")
        if q.shape[1] % k.shape[1] != 0:
            raise ValueError("heads do not divide")
        if tile < 1:
            raise ValueError("tile < 1")
        self.q, self.k, self.v, self.causal, self.tile = q, k, v, causal, tile
        self.share = q.shape[1] // k.shape[1]
        self.offset = k.shape[2] - q.shape[2]
        self.scale = 1.0 / np.sqrt(q.shape[3])

    def query_spans(self):
        """Blocks of queries that see any key; under a causal mask the first rows may see none."""
        for lo in range(0, self.q.shape[2], self.tile):
            yield lo, min(lo + self.tile, self.q.shape[2])

    def key_spans(self, hi):
        end = self.k.shape[2]
        if self.causal:
            end = min(end, hi + self.offset)
        starts = range(0, max(end, 0), self.tile)
        return [(a, min(a + self.tile, end)) for a in reversed(starts)]

    def queries(self, lo, hi):
        return self.q[:, :, lo:hi].astype(float) * self.scale

    def keys(self, a, z):
        return np.repeat(self.k[:, :, a:z].astype(float), self.share, axis=1)

    def values(self, a, z):
        return np.repeat(self.v[:, :, a:z].astype(float), self.share, axis=1)

    def fold(self, per_head):
        B, H, n, D = per_head.shape
        return per_head.reshape(B, H // self.share, self.share, n, D).sum(axis=2)

    def scores(self, lo, hi, a, z):
        scores = self.queries(lo, hi) @ self.keys(a, z).swapaxes(2, 3)
        if self.causal:
            visible = np.arange(a, z)[None, :] <= np.arange(lo, hi)[:, None] + self.offset
            scores[..., ~visible] = -np.inf
        return scores

    def statistics(self, lo, hi):
        """The log-sum-exp of each row, −inf where no key is visible."""
        found = np.full((*self.q.shape[:2], hi - lo), -np.inf)
        for a, z in self.key_spans(hi):
            found = np.logaddexp(found, np.logaddexp.reduce(self.scores(lo, hi, a, z), axis=3))
        return found

    def weights(self, lo, hi, a, z, stats):
        stats = np.where(stats == -np.inf, np.inf, stats)
        return np.exp(self.scores(lo, hi, a, z) - stats[..., None])
