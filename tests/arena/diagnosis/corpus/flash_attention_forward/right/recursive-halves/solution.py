"""Flash attention by recursion: split queries, then keys, in halves until a tile is small enough.

Everything inside a tile is float64; results are cast back at the end.
"""

import math

import numpy as np


class _Problem:
    """One head: q (T,D), k and v (S,D), and where the answers go."""

    def __init__(self, q, k, v, out, lse, shift, tile):
        self.q, self.k, self.v = q, k, v
        self.out, self.lse = out, lse
        self.shift, self.tile = shift, tile

    def solve(self, t0, t1):
        """Answer queries t0..t1."""
        if t1 - t0 > self.tile:
            middle = (t0 + t1) // 2
            self.solve(t0, middle)
            self.solve(middle, t1)
            return
        if t1 == t0:
            return
        q = self.q[t0:t1].astype(np.float64) / math.sqrt(self.q.shape[1])
        top, mass, mix = self.over_keys(q, t0, 0, len(self.k))
        seen = mass > 0
        self.out[t0:t1][seen] = mix[seen] / mass[seen, None]
        self.lse[t0:t1][seen] = top[seen] + np.log(mass[seen])

    def over_keys(self, q, t0, s0, s1):
        """(top, mass, mix) of keys s0..s1: row maximum, sum of exps, sum of exp times value."""
        rows = len(q)
        if self.shift is not None:
            s1 = min(s1, t0 + rows + self.shift)  # nothing later is seen by any row
        if s1 <= s0:
            return np.full(rows, -np.inf), np.zeros(rows), np.zeros(q.shape)
        if s1 - s0 > self.tile:
            middle = (s0 + s1) // 2
            return self.join(self.over_keys(q, t0, s0, middle), self.over_keys(q, t0, middle, s1))
        return self.leaf(q, t0, s0, s1)

    def leaf(self, q, t0, s0, s1):
        score = q @ self.k[s0:s1].astype(np.float64).T
        if self.shift is not None:
            row = t0 + np.arange(len(q)) + self.shift
            score = np.where(np.arange(s0, s1) > row[:, None], -np.inf, score)
        top = score.max(axis=1)
        weight = np.exp(score - np.where(top > -np.inf, top, 0.0)[:, None])
        return top, weight.sum(axis=1), weight @ self.v[s0:s1].astype(np.float64)

    @staticmethod
    def join(left, right):
        top = np.maximum(left[0], right[0])
        pivot = np.where(top > -np.inf, top, 0.0)
        a, b = np.exp(left[0] - pivot), np.exp(right[0] - pivot)
        mass = a * left[1] + b * right[1]
        mix = a[:, None] * left[2] + b[:, None] * right[2]
        return top, mass, mix


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError("expected four axes")
    if q.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"unsupported dtype {q.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError("dtypes differ")
    if k.shape != v.shape:
        raise ValueError("k and v differ")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError("batch or width differ")
    heads, groups = q.shape[1], k.shape[1]
    if not groups or heads % groups:
        raise ValueError("H must be a multiple of G")
    if tile < 1:
        raise ValueError("tile must be positive")

    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:-1], -np.inf, q.dtype)
    shift = k.shape[2] - q.shape[2] if causal else None
    with np.errstate(over="ignore", under="ignore"):
        for b in range(q.shape[0]):
            for h in range(heads):
                g = h // (heads // groups)
                head = _Problem(q[b, h], k[b, g], v[b, g], out[b, h], lse[b, h], shift, int(tile))
                head.solve(0, q.shape[2])
    return out, lse
