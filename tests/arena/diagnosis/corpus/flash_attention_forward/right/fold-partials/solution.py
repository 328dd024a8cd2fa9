"""Flash attention as a fold: every key tile gives a partial softmax, and partials are merged."""

from functools import reduce

import numpy as np


def _spans(n, step):
    return [(a, min(a + step, n)) for a in range(0, n, step)]


def _check(q, k, v, tile):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} is not an array")
        if x.ndim != 4:
            raise ValueError(f"{name} needs 4 axes, has {x.ndim}")
        if x.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} has dtype {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError("q, k and v differ in dtype")
    if k.shape != v.shape:
        raise ValueError("k and v differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError("q does not fit k")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError("query heads are no multiple of kv heads")
    if tile < 1:
        raise ValueError("tile < 1")


def _base(m):
    """The maximum to subtract; 0 where nothing was seen."""
    return np.where(np.isneginf(m), np.zeros_like(m), m)


def _partial(q, k, v, visible):
    """Row maximum, sum of exponentials and normalised output over one key tile."""
    s = q @ k.T
    if visible is not None:
        s[~visible] = -np.inf
    m = s.max(axis=1)
    s -= _base(m)[:, None]
    p = np.exp(s, out=s)
    total = p.sum(axis=1)
    p /= np.maximum(total, 1)[:, None]
    return m, total, p @ v


def _merge(a, b):
    ma, la, oa = a
    mb, lb, ob = b
    m = np.maximum(ma, mb)
    base = _base(m)
    wa = la * np.exp(ma - base)
    wb = lb * np.exp(mb - base)
    total = wa + wb
    safe = np.where(total > 0, total, np.ones_like(total))
    return m, total, oa * (wa / safe)[:, None] + ob * (wb / safe)[:, None]


def _visible(t0, t1, s0, s1, shift, causal):
    """The boolean mask of a tile, or None where all of it is visible."""
    if not causal or s1 - 1 <= t0 + shift:
        return None
    return np.arange(s0, s1) <= np.arange(t0, t1)[:, None] + shift


def _rows(q, k, v, t0, causal, shift, tile):
    """out and lse for one tile of queries of one head."""
    n, width = q.shape
    nothing = (
        np.full(n, -np.inf, q.dtype),
        np.zeros(n, q.dtype),
        np.zeros((n, width), q.dtype),
    )
    partials = (
        _partial(q, k[a:b], v[a:b], _visible(t0, t0 + n, a, b, shift, causal))
        for a, b in _spans(len(k), tile)
        if not causal or a <= t0 + n - 1 + shift
    )
    m, total, out = reduce(_merge, partials, nothing)
    return out, m + np.log(total)


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    _check(q, k, v, tile)
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    ratio = heads // k.shape[1]
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    with np.errstate(all="ignore"):
        for b in range(batch):
            for h in range(heads):
                kh, vh = k[b, h // ratio], v[b, h // ratio]
                for t0, t1 in _spans(queries, tile):
                    scaled = q[b, h, t0:t1] * width**-0.5
                    out[b, h, t0:t1], lse[b, h, t0:t1] = _rows(
                        scaled, kh, vh, t0, causal, keys - queries, tile
                    )
    return out, lse
