"""Flash attention in einsum, all heads of a group at once, in float64 inside."""

from functools import partial

import numpy as np

einsum = partial(np.einsum, optimize=["einsum_path", (0, 1)])
# r: heads of a group, t: queries, s: keys, d: width


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and lse (B,H,T)."""
    q, k, v = _arrays(q, k, v)
    _fit(q, k, v, tile)
    groups = k.shape[1]
    out = np.zeros(_split(q, groups).shape)
    lse = np.full(out.shape[:-1], -np.inf)
    for b, g in np.ndindex(k.shape[:2]):
        qg = _scaled(_split(q, groups)[b, g])
        for rows in _row_blocks(qg, k.shape[2], causal, tile):
            peak, mass = _softmax_sums(qg, k[b, g], rows, causal, tile)
            acc = np.zeros(qg[:, rows].shape)
            for cols in _col_blocks(rows, qg.shape[1], k.shape[2], causal, tile):
                p = np.exp(_scores(qg, k[b, g], rows, cols, causal) - peak[..., None])
                acc += einsum("rts,sd->rtd", p, v[b, g, cols].astype(np.float64))
            out[b, g, :, rows] = einsum("rtd,rt->rtd", acc, 1 / mass)
            lse[b, g, :, rows] = peak + np.log(mass)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3]).astype(q.dtype)


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """dq (B,H,T,D), dk and dv (B,G,S,D)."""
    dout, q, k, v, out, lse = _arrays(dout, q, k, v, out, lse)
    _fit(q, k, v, tile)
    if not (dout.shape == out.shape == q.shape and lse.shape == q.shape[:-1]):
        raise ValueError("dout, out or lse does not have the shape that q asks for")
    groups, keys = k.shape[1:3]
    queries, width = q.shape[2:]
    dq = np.zeros(_split(q, groups).shape)
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    for b, g in np.ndindex(k.shape[:2]):
        qg = _scaled(_split(q, groups)[b, g])
        kg, vg = k[b, g].astype(np.float64), v[b, g].astype(np.float64)
        for rows in _row_blocks(qg, keys, causal, tile):
            do = _split(dout, groups)[b, g, :, rows].astype(np.float64)
            delta = einsum("rtd,rtd->rt", do, _split(out, groups)[b, g, :, rows])
            peak, mass = _softmax_sums(qg, kg, rows, causal, tile)
            for cols in _col_blocks(rows, queries, keys, causal, tile):
                p = np.exp(_scores(qg, kg, rows, cols, causal) - peak[..., None])
                p = einsum("rts,rt->rts", p, 1 / mass)
                dp = einsum("rtd,sd->rts", do, vg[cols])
                ds = p * (dp - delta[..., None])
                dv[b, g, cols] += einsum("rts,rtd->sd", p, do)
                dk[b, g, cols] += einsum("rts,rtd->sd", ds, qg[:, rows])
                dq[b, g, :, rows] += einsum("rts,sd->rtd", ds, kg[cols]) * width**-0.5
    return tuple(x.reshape(y.shape).astype(q.dtype) for x, y in ((dq, q), (dk, k), (dv, v)))


def _split(x, groups):
    """(B, H, ...) as (B, G, H/G, ...)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _scaled(q):
    return q.astype(np.float64) * q.shape[-1] ** -0.5


def _row_blocks(qg, keys, causal, tile):
    """Blocks of queries that see something, so thin that all heads together make one tile."""
    heads, queries = qg.shape[:2]
    first = max(0, queries - keys) if causal else 0
    if keys == 0:
        first = queries
    height = max(1, tile // heads)
    for start in range(first, queries, height):
        yield slice(start, min(start + height, queries))


def _col_blocks(rows, queries, keys, causal, tile):
    stop = min(keys, rows.stop + keys - queries) if causal else keys
    for start in range(0, stop, tile):
        yield slice(start, min(start + tile, stop))


def _scores(qg, kg, rows, cols, causal):
    scores = einsum("rtd,sd->rts", qg[:, rows], kg[cols].astype(np.float64))
    if causal:
        t = np.arange(rows.start, rows.stop)[:, None]
        j = np.arange(cols.start, cols.stop)
        scores = np.where(j <= t + len(kg) - qg.shape[1], scores, -np.inf)
    return scores


@np.errstate(over="ignore")
def _softmax_sums(qg, kg, rows, causal, tile):
    """Row maxima and sums of exp(score - maximum), in one sweep over the keys."""
    peak = np.full(qg[:, rows].shape[:2], -np.inf)
    mass = np.zeros(peak.shape)
    for cols in _col_blocks(rows, qg.shape[1], len(kg), causal, tile):
        scores = _scores(qg, kg, rows, cols, causal)
        higher = np.maximum(peak, scores.max(axis=2))
        mass = mass * np.exp(peak - higher) + np.exp(scores - higher[..., None]).sum(axis=2)
        peak = higher
    return peak, mass


def _arrays(*xs):
    xs = [np.asarray(x) for x in xs]
    if any(x.dtype not in (np.float32, np.float64) for x in xs):
        raise TypeError("arrays must be float32 or float64")
    return xs


def _fit(q, k, v, tile):
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError("q, k and v need four axes, and k and v the same shape")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError("q and k differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError("H must be a multiple of G")
    if tile < 1:
        raise ValueError("tile must be at least 1")
