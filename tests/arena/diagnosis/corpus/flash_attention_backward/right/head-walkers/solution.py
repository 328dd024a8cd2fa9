"""Flash attention and its gradients, one head at a time, queries in the outer loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tiling:
    """How the pairs (query, key) of one head are cut into tiles."""

    queries: int
    keys: int
    size: int
    causal: bool

    @property
    def offset(self) -> int:
        """Query t sees the keys up to t + offset."""
        return self.keys - self.queries

    def query_tiles(self):
        """Slices of the queries that see a key."""
        start = 0
        if self.causal:
            start = max(start, -self.offset)
        if self.keys == 0:
            start = self.queries
        for low in range(start, self.queries, self.size):
            yield slice(low, min(low + self.size, self.queries))

    def key_tiles(self, rows: slice):
        """Slices of the keys that at least one of these queries sees."""
        end = self.keys
        if self.causal:
            end = min(end, rows.stop + self.offset)
        for low in range(0, end, self.size):
            yield slice(low, min(low + self.size, end))

    def visible(self, rows: slice, cols: slice):
        """The mask of a tile."""
        if not self.causal:
            return np.True_
        limit = np.arange(rows.start, rows.stop) + self.offset
        return np.arange(cols.start, cols.stop)[None, :] <= limit[:, None]


class RunningSoftmax:
    """The softmax-weighted sum of values for some queries, fed with one key tile at a time."""

    def __init__(self, count, width, dtype):
        self.top = np.full(count, -np.inf, dtype=dtype)
        self.norm = np.zeros(count, dtype=dtype)
        self.acc = np.zeros((count, width), dtype=dtype)

    def feed(self, scores, values):
        """Take in the scores (rows, cols) of a tile, hidden ones −inf, and its values."""
        top = np.maximum(self.top, scores.max(axis=1))
        anchor = np.where(np.isneginf(top), 0, top).astype(scores.dtype)
        shrink = np.exp(self.top - anchor)
        terms = np.exp(scores - anchor[:, None])
        self.norm = shrink * self.norm + terms.sum(axis=1)
        self.acc = shrink[:, None] * self.acc + terms @ values
        self.top = top

    def result(self):
        """The weighted means and the logarithms of the normalisers."""
        return self.acc / self.norm[:, None], self.top + np.log(self.norm)


class HeadGradient:
    """The backward pass of one query head; adds into the gradients it is given."""

    def __init__(self, query, key, value, tiling):
        self.query, self.key, self.value = query, key, value
        self.tiling = tiling
        self.scale = 1.0 / math.sqrt(query.shape[1])

    def probabilities(self, rows, cols, lse):
        """The attention weights of a tile, from the saved log-sum-exp."""
        exponent = self.scale * (self.query[rows] @ self.key[cols].T)
        exponent -= lse[rows, None]
        np.clip(exponent, None, 0, out=exponent)
        return np.where(self.tiling.visible(rows, cols), np.exp(exponent), 0).astype(
            self.query.dtype, copy=False
        )

    def accumulate(self, dout, out, lse, dquery, dkey, dvalue):
        """Add this head's gradients."""
        for rows in self.tiling.query_tiles():
            upstream = dout[rows]
            inner = (upstream * out[rows]).sum(axis=1)
            for cols in self.tiling.key_tiles(rows):
                prob = self.probabilities(rows, cols, lse)
                dvalue[cols] += prob.T @ upstream
                dprob = upstream @ self.value[cols].T
                dscore = prob * (dprob - inner[:, None])
                dquery[rows] += dscore @ self.key[cols]
                dkey[cols] += self.scale * (dscore.T @ self.query[rows])
            dquery[rows] *= self.scale


def _validate(tile, named_arrays):
    """Check every array's dtype and shape; `named_arrays` maps q, k, v and more to arrays."""
    for name, array in named_arrays.items():
        axes = 3 if name == "lse" else 4
        if array.ndim != axes:
            raise ValueError(f"{name} needs {axes} axes")
        if array.dtype.type not in (np.float32, np.float64):
            raise TypeError(f"{name} needs dtype float32 or float64")
    if tile < 1:
        raise ValueError("tile must be positive")
    batch, heads, length, width = named_arrays["q"].shape
    groups, keys = named_arrays["k"].shape[1:3]
    if heads % groups:
        raise ValueError("H must be a multiple of G")
    expected = {
        "q": (batch, heads, length, width),
        "k": (batch, groups, keys, width),
        "v": (batch, groups, keys, width),
        "out": (batch, heads, length, width),
        "dout": (batch, heads, length, width),
        "lse": (batch, heads, length),
    }
    for name, array in named_arrays.items():
        if array.shape != expected[name]:
            raise ValueError(f"{name} has shape {array.shape}, expected {expected[name]}")


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    _validate(tile, {"q": q, "k": k, "v": v})
    batch, heads, length, width = q.shape
    share = heads // k.shape[1]
    tiling = Tiling(length, k.shape[2], tile, causal)
    out = np.zeros(q.shape, q.dtype)
    lse = np.full((batch, heads, length), -np.inf, q.dtype)
    for b, h in np.ndindex(batch, heads):
        key, value = k[b, h // share], v[b, h // share]
        for rows in tiling.query_tiles():
            query = q[b, h, rows] / math.sqrt(width)
            state = RunningSoftmax(len(query), width, q.dtype)
            for cols in tiling.key_tiles(rows):
                scores = query @ key[cols].T
                visible = tiling.visible(rows, cols)
                scores = np.where(visible, scores, -np.inf).astype(q.dtype, copy=False)
                state.feed(scores, value[cols])
            out[b, h, rows], lse[b, h, rows] = state.result()
    return out, lse


def flash_attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    causal: bool = False,
    tile: int = 64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients dq (B,H,T,D), dk and dv (B,G,S,D) of flash_attention's out along dout."""
    _validate(tile, {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse})
    batch, heads, length, _ = q.shape
    share = heads // k.shape[1]
    tiling = Tiling(length, k.shape[2], tile, causal)
    dq = np.zeros(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)
    for b, h in np.ndindex(batch, heads):
        g = h // share
        walker = HeadGradient(q[b, h], k[b, g], v[b, g], tiling)
        walker.accumulate(dout[b, h], out[b, h], lse[b, h], dq[b, h], dk[b, g], dv[b, g])
    return dq, dk, dv
