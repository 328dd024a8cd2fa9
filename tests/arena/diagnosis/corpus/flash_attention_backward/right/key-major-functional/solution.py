# ruff: noqa: E501
"""Flash attention from small functions; the backward pass walks over keys outside, queries inside."""

from itertools import product
from typing import NamedTuple

import numpy as np

# up to here a stored log-sum-exp is precise enough to be used instead of a new row maximum
SMALL = 8.0


class Setting(NamedTuple):
    queries: int
    keys: int
    causal: bool
    tile: int

    @property
    def offset(self):
        return self.keys - self.queries


def chunks(start, stop, size):
    return [(i, min(i + size, stop)) for i in range(start, stop, size)]


def seeing_chunks(c, first_key=0):
    """Chunks of the queries that see `first_key` or an earlier key, last query included."""
    start = max(0, first_key - c.offset) if c.causal else 0
    return chunks(start, c.queries if c.keys else 0, c.tile)


def key_chunks(c, query_stop=None):
    stop = c.keys if query_stop is None or not c.causal else query_stop + c.offset
    return chunks(0, stop, c.tile)


def tile_scores(qs, ks, t0, s0, c):
    scores = qs @ ks.T
    if c.causal and s0 + len(ks) - 1 > t0 + c.offset:
        last = np.arange(t0, t0 + len(qs)) + c.offset
        scores += np.where(np.arange(s0, s0 + len(ks)) > last[:, None], -np.inf, 0).astype(qs.dtype)
    return scores


def fold(qs, k, v, t0, c):
    """Online softmax of some queries over all keys they see: maximum, sum, weighted values."""
    m = np.full(len(qs), -np.inf, qs.dtype)
    z = np.zeros(len(qs), qs.dtype)
    a = np.zeros(qs.shape, qs.dtype)
    for s0, s1 in key_chunks(c, t0 + len(qs)):
        s = tile_scores(qs, k[s0:s1], t0, s0, c)
        new = np.maximum(m, s.max(axis=1))
        p, old = np.exp(s - new[:, None]), np.exp(m - new)
        m, z, a = new, z * old + p.sum(axis=1), a * old[:, None] + p @ v[s0:s1]
    return m, z, a


def normalisers(qs, k, v, lse, c):
    """shift and factor with p = exp(score - shift) * factor for every query that sees a key."""
    shift, factor = lse.copy(), np.ones_like(lse)
    for t0, t1 in seeing_chunks(c):
        if np.abs(lse[t0:t1]).max() > SMALL:
            shift[t0:t1], z, _ = fold(qs[t0:t1], k, v, t0, c)
            factor[t0:t1] = 1 / z
    return shift[:, None], factor[:, None]


def head_forward(q, k, v, c):
    out, lse = np.zeros(q.shape, q.dtype), np.full(len(q), -np.inf, q.dtype)
    qs = scaled(q)
    for t0, t1 in seeing_chunks(c):
        m, z, a = fold(qs[t0:t1], k, v, t0, c)
        out[t0:t1], lse[t0:t1] = a / z[:, None], m + np.log(z)
    return out, lse


def head_backward(dout, q, k, v, out, lse, c):
    qs = scaled(q)
    shift, factor = normalisers(qs, k, v, lse, c)
    dq, dk, dv = np.zeros_like(qs), np.zeros(k.shape, q.dtype), np.zeros(v.shape, q.dtype)
    for s0, s1 in key_chunks(c):
        ks, vs = scaled(k[s0:s1]), v[s0:s1]
        for t0, t1 in seeing_chunks(c, s0):
            do = dout[t0:t1]
            p = np.exp(tile_scores(qs[t0:t1], k[s0:s1], t0, s0, c) - shift[t0:t1]) * factor[t0:t1]
            delta = np.einsum("td,td->t", do, out[t0:t1])[:, None]
            ds = p * (do @ vs.T - delta)
            dv[s0:s1] += p.T @ do
            dk[s0:s1] += ds.T @ qs[t0:t1]
            dq[t0:t1] += ds @ ks
    return dq, dk, dv


def scaled(x):
    return x * x.dtype.type(x.shape[-1] ** -0.5)


def flash_attention(q, k, v, *, causal=False, tile=64):
    """out (B,H,T,D), lse (B,H,T)."""
    q, k, v = validated([q, k, v], tile)
    c = Setting(q.shape[2], k.shape[2], bool(causal), tile)
    share = q.shape[1] // k.shape[1]
    out, lse = np.empty(q.shape, q.dtype), np.empty(q.shape[:3], q.dtype)
    with np.errstate(over="ignore", under="ignore"):
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            out[b, h], lse[b, h] = head_forward(q[b, h], k[b, h // share], v[b, h // share], c)
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """dq (B,H,T,D), dk and dv (B,G,S,D)."""
    q, k, v = validated([q, k, v], tile)
    dout, out, lse = (np.asarray(x) for x in (dout, out, lse))
    if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError("dout, out, lse: wrong shape")
    if {dout.dtype, out.dtype, lse.dtype} != {q.dtype}:
        raise TypeError("all arrays must have one dtype")
    c = Setting(q.shape[2], k.shape[2], bool(causal), tile)
    share = q.shape[1] // k.shape[1]
    dq, dk, dv = (np.zeros(x.shape, q.dtype) for x in (q, k, v))
    with np.errstate(over="ignore", under="ignore"):
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            g = h // share
            grads = head_backward(dout[b, h], q[b, h], k[b, g], v[b, g], out[b, h], lse[b, h], c)
            dq[b, h] = grads[0]
            dk[b, g] += grads[1]
            dv[b, g] += grads[2]
    return dq, dk, dv


def validated(arrays, tile):
    q, k, v = arrays = [np.asarray(x) for x in arrays]
    if any(x.dtype.kind != "f" for x in arrays):
        raise TypeError("only floats")
    if [x.ndim for x in arrays] != [4, 4, 4]:
        raise ValueError("four axes each")
    if k.shape != v.shape or k.shape[::3] != q.shape[::3]:
        raise ValueError("shapes do not fit")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError("H must be a multiple of G")
    if tile < 1:
        raise ValueError("tile must be positive")
    return arrays
