"""Flash attention as objects: a problem cuts itself into heads, a head into tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Span:
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, size: int) -> Iterator[Span]:
        for start in range(self.start, self.stop, size):
            yield Span(start, min(start + size, self.stop))


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees."""

    queries: int
    keys: int
    causal: bool

    def seeing(self) -> Span:
        """Queries that see at least one key."""
        if self.keys == 0:
            return Span(self.queries, self.queries)
        blind = max(0, self.queries - self.keys) if self.causal else 0
        return Span(blind, self.queries)

    def seen_by(self, rows: Span) -> Span:
        if not self.causal:
            return Span(0, self.keys)
        return Span(0, rows.stop + self.keys - self.queries)

    def hide(self, scores: np.ndarray, rows: Span, cols: Span) -> None:
        offset = self.keys - self.queries
        if self.causal and cols.stop - 1 > rows.start + offset:
            allowed = np.tri(len(rows), len(cols), rows.start + offset - cols.start, dtype=bool)
            scores[~allowed] = -np.inf


class RunningSoftmax:
    """Online softmax of a tile of rows: maximum, sum and weighted sums of whatever is fed in."""

    def __init__(self, rows: int, width: int, dtype) -> None:
        self.peak = np.full((rows, 1), -np.inf, dtype=dtype)
        self.mass = np.zeros((rows, 1), dtype=dtype)
        self.sums = np.zeros((rows, width), dtype=dtype)

    def feed(self, scores: np.ndarray, weigh) -> None:
        peak = np.maximum(self.peak, scores.max(axis=1, keepdims=True))
        fade = np.exp(self.peak - peak)
        weights = np.exp(scores - peak)
        self.mass = self.mass * fade + weights.sum(axis=1, keepdims=True)
        self.sums = self.sums * fade + weigh(weights)
        self.peak = peak

    @property
    def mean(self) -> np.ndarray:
        return self.sums / self.mass

    @property
    def logsumexp(self) -> np.ndarray:
        return (self.peak + np.log(self.mass))[:, 0]


class Head:
    """One query head with the keys and values that it reads."""

    def __init__(self, q, k, v, seen: Visibility, tile: int) -> None:
        self.k, self.v, self.seen, self.tile = k, v, seen, tile
        self.scale = q.dtype.type(1.0 / np.sqrt(q.shape[-1]))
        self.q = q * self.scale

    def tiles(self, rows: Span) -> Iterator[tuple[Span, np.ndarray]]:
        for cols in self.seen.seen_by(rows).cut(self.tile):
            scores = self.q[rows.slice] @ self.k[cols.slice].T
            self.seen.hide(scores, rows, cols)
            yield cols, scores

    def forward(self, out: np.ndarray, lse: np.ndarray) -> None:
        for rows in self.seen.seeing().cut(self.tile):
            state = RunningSoftmax(len(rows), self.v.shape[1], self.q.dtype)
            for cols, scores in self.tiles(rows):
                values = self.v[cols.slice]
                state.feed(scores, lambda weights, values=values: weights @ values)
            out[rows.slice] = state.mean
            lse[rows.slice] = state.logsumexp

    def backward(self, dout, dq, dk, dv) -> None:
        for rows in self.seen.seeing().cut(self.tile):
            upstream = dout[rows.slice]
            state = RunningSoftmax(len(rows), 1, self.q.dtype)
            for cols, scores in self.tiles(rows):
                dp = upstream @ self.v[cols.slice].T
                state.feed(scores, lambda w, dp=dp: (w * dp).sum(axis=1, keepdims=True))
            for cols, scores in self.tiles(rows):
                p = np.exp(scores - state.peak) / state.mass
                dp = upstream @ self.v[cols.slice].T
                ds = p * (dp - state.mean)
                dv[cols.slice] += p.T @ upstream
                dk[cols.slice] += ds.T @ self.q[rows.slice]
                dq[rows.slice] += (ds * self.scale) @ self.k[cols.slice]


class Problem:
    """Checked arguments of one call."""

    def __init__(self, q, k, v, causal: bool, tile: int) -> None:
        self.q, self.k, self.v = (self.floats(x, 4) for x in (q, k, v))
        if self.k.shape != self.v.shape:
            raise ValueError("k and v differ in shape")
        batch, heads, queries, width = self.q.shape
        if self.k.shape[0] != batch or self.k.shape[3] != width:
            raise ValueError("k does not fit q")
        groups, keys = self.k.shape[1:3]
        if not groups or heads % groups:
            raise ValueError(f"{heads} query heads cannot share {groups} key/value heads")
        if tile < 1:
            raise ValueError("tile must be positive")
        self.share = heads // groups
        self.tile = tile
        self.seen = Visibility(queries, keys, bool(causal))

    @staticmethod
    def floats(x, axes: int) -> np.ndarray:
        x = np.asarray(x)
        if x.ndim != axes:
            raise ValueError(f"expected {axes} axes, got {x.ndim}")
        if not np.issubdtype(x.dtype, np.floating):
            raise TypeError(f"expected floats, got {x.dtype}")
        return x

    def like_q(self, x, shape) -> np.ndarray:
        x = self.floats(x, len(shape))
        if x.shape != shape:
            raise ValueError(f"expected shape {shape}, got {x.shape}")
        return x

    def heads(self) -> Iterator[tuple[tuple[int, int], tuple[int, int], Head]]:
        for b, h in np.ndindex(self.q.shape[:2]):
            kv = (b, h // self.share)
            yield (b, h), kv, Head(self.q[b, h], self.k[kv], self.v[kv], self.seen, self.tile)


@np.errstate(over="ignore", under="ignore")
def flash_attention(q, k, v, *, causal=False, tile=64):
    """out and log-sum-exp of softmax attention."""
    problem = Problem(q, k, v, causal, tile)
    out = np.zeros(problem.q.shape, problem.q.dtype)
    lse = np.full(problem.q.shape[:3], -np.inf, problem.q.dtype)
    for at, _, head in problem.heads():
        head.forward(out[at], lse[at])
    return out, lse


@np.errstate(over="ignore", under="ignore")
def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """Gradients of softmax attention; out and lse are checked but formed anew."""
    problem = Problem(q, k, v, causal, tile)
    dout = problem.like_q(dout, problem.q.shape)
    problem.like_q(out, problem.q.shape)
    problem.like_q(lse, problem.q.shape[:3])
    dq, dk, dv = (np.zeros(x.shape, problem.q.dtype) for x in (problem.q, problem.k, problem.v))
    for at, kv, head in problem.heads():
        head.backward(dout[at], dq[at], dk[kv], dv[kv])
    return dq, dk, dv
