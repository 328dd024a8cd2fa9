"""Two loops, no shared accumulator: one walks keys for dq, one walks queries for dk and dv.

Each loop owns what it writes, as deterministic GPU kernels do; the query heads of a group are
stacked into one tall matrix, so that summing over a group is part of a matrix product.
"""

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """out and lse in two passes over the keys: log-sum-exp first, then the weighted values."""
    _validate(q, k, v, tile)
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    offset = k.shape[2] - q.shape[2]
    for b, g, heads in _groups(q, k):
        for rows in _tiles(q.shape[2], tile):
            for cols in _tiles(_reach(rows, offset, k.shape[2], causal), tile):
                scores = _scores(q[b, heads, rows], k[b, g, cols], rows, cols, offset, causal)
                top = scores.max(axis=-1)
                base = np.where(np.isneginf(top), 0, top)
                with np.errstate(divide="ignore"):
                    part = base + np.log(np.exp(scores - base[..., None]).sum(axis=-1))
                lse[b, heads, rows] = np.logaddexp(lse[b, heads, rows], part)
            for cols in _tiles(_reach(rows, offset, k.shape[2], causal), tile):
                scores = _scores(q[b, heads, rows], k[b, g, cols], rows, cols, offset, causal)
                out[b, heads, rows] += _probabilities(scores, lse[b, heads, rows]) @ v[b, g, cols]
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """dq with queries outside, then dk and dv with keys outside."""
    _validate(q, k, v, tile)
    for name, x, shape in (
        ("dout", dout, q.shape),
        ("out", out, q.shape),
        ("lse", lse, q.shape[:3]),
    ):
        if not np.issubdtype(x.dtype, np.floating) or x.shape != shape:
            raise ValueError(f"{name} must be floating point of shape {shape}")
    dout = np.where(np.isneginf(lse)[..., None], 0, dout)
    row_dots = np.einsum("bhtd,bhtd->bht", dout, out)
    dq = np.zeros(q.shape, q.dtype)
    dk, dv = np.zeros(k.shape, k.dtype), np.zeros(v.shape, v.dtype)
    T, S = q.shape[2], k.shape[2]
    offset = S - T
    for b, g, heads in _groups(q, k):
        for rows in _tiles(T, tile):
            for cols in _tiles(_reach(rows, offset, S, causal), tile):
                _, slope = _tile(b, g, heads, rows, cols, dout, q, k, v, lse, row_dots, causal)
                dq[b, heads, rows] += slope @ k[b, g, cols]
        for cols in _tiles(S, tile):
            first = max(cols.start - offset, 0) if causal else 0
            for rows in _tiles(T, tile, first - first % tile):
                prob, slope = _tile(b, g, heads, rows, cols, dout, q, k, v, lse, row_dots, causal)
                dk[b, g, cols] += _tall(slope).T @ _tall(q[b, heads, rows])
                dv[b, g, cols] += _tall(prob).T @ _tall(dout[b, heads, rows])
    return dq, dk, dv


def _tile(b, g, heads, rows, cols, dout, q, k, v, lse, row_dots, causal):
    """Probabilities and slopes of the loss with respect to the unscaled scores, (R, rows, cols)."""
    offset = k.shape[2] - q.shape[2]
    scores = _scores(q[b, heads, rows], k[b, g, cols], rows, cols, offset, causal)
    prob = _probabilities(scores, lse[b, heads, rows])
    gain = dout[b, heads, rows] @ v[b, g, cols].T - row_dots[b, heads, rows, None]
    return prob, prob * gain / q.dtype.type(q.shape[3]) ** 0.5


def _scores(q, k, rows, cols, offset, causal):
    scores = (q @ k.T) / q.dtype.type(q.shape[-1] ** 0.5)
    if causal:
        ahead = np.arange(cols.start, cols.stop) - np.arange(rows.start, rows.stop)[:, None]
        scores = np.where(ahead > offset, q.dtype.type(-np.inf), scores)
    return scores


def _probabilities(scores, lse):
    live = lse > -np.inf
    exponents = np.minimum(scores - np.where(live, lse, 0)[..., None], 0)
    return np.where(live[..., None], np.exp(exponents), 0)


def _tall(x):
    """(R, n, m) -> (R·n, m)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _groups(q, k):
    """Batch row, kv head and the slice of query heads that share it."""
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for g in range(k.shape[1]):
            yield b, g, slice(g * share, (g + 1) * share)


def _tiles(length, tile, start=0):
    for first in range(start, length, tile):
        yield slice(first, min(first + tile, length))


def _reach(rows, offset, keys, causal):
    """How many keys the last of these rows sees."""
    return max(0, min(keys, rows.stop + offset)) if causal else keys


def _validate(q, k, v, tile):
    if not all(np.issubdtype(x.dtype, np.floating) for x in (q, k, v)):
        raise TypeError("floating-point arrays expected")
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError("q (B,H,T,D), k and v (B,G,S,D) expected")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError("q does not fit k")
    if tile < 1:
        raise ValueError("tile must be at least 1")
