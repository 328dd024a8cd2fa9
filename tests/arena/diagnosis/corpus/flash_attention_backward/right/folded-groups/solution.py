"""Flash attention and its gradients, all heads at once: heads of a group are folded into rows."""

import numpy as np


def _check(q, k, v, tile):
    """Raise on arguments that the contract refuses."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
        _check_dtype(name, array)
    if k.shape != v.shape:
        raise ValueError("k and v must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError("q and k must agree in batch and width")
    if q.shape[1] % k.shape[1]:
        raise ValueError("the query heads must be a multiple of the key/value heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")


def _check_dtype(name, array):
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")


def _spans(start, stop, tile):
    """Consecutive pairs (lo, hi) that cover start..stop."""
    return [(lo, min(lo + tile, stop)) for lo in range(start, stop, tile)]


def _fold(x, groups):
    """(B, H, n, ...) as (B, G, R, n, ...)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _rows(x):
    """(B, G, R, n, ...) as (B, G, R*n, ...)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _hidden(rows, cols, shift, repeats):
    """Which pairs of a tile are hidden, (R*rows, cols), or None if all are visible."""
    if cols[1] - 1 <= rows[0] + shift:
        return None
    late = np.arange(*cols) > np.arange(*rows)[:, None] + shift
    return np.tile(late, (repeats, 1))


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    _check(q, k, v, tile)
    batch, heads, length, width = q.shape
    groups, keys = k.shape[1:3]
    repeats = heads // groups
    scale = width**-0.5
    shift = keys - length
    out = np.zeros(q.shape, dtype=q.dtype)
    lse = np.full(q.shape[:3], -np.inf, dtype=q.dtype)
    q5, out5, lse4 = _fold(q, groups), _fold(out, groups), _fold(lse, groups)
    first = max(0, -shift) if causal else 0

    for lo, hi in _spans(first, length, tile):
        queries = _rows(q5[:, :, :, lo:hi]) * scale
        peak = np.full((*queries.shape[:3], 1), -np.inf, dtype=q.dtype)
        mass = np.zeros_like(peak)
        total = np.zeros_like(queries)
        seen = min(keys, hi + shift) if causal else keys
        for left, right in _spans(0, seen, tile):
            scores = queries @ k[:, :, left:right].swapaxes(2, 3)
            hidden = _hidden((lo, hi), (left, right), shift, repeats) if causal else None
            if hidden is not None:
                scores[..., hidden] = -np.inf
            new_peak = np.maximum(peak, scores.max(axis=-1, keepdims=True))
            weights = np.exp(scores - new_peak)
            fade = np.exp(peak - new_peak)
            mass = mass * fade + weights.sum(axis=-1, keepdims=True)
            total = total * fade + weights @ v[:, :, left:right]
            peak = new_peak
        if seen > 0:
            shape = (batch, groups, repeats, hi - lo)
            out5[:, :, :, lo:hi] = (total / mass).reshape(*shape, width)
            lse4[:, :, :, lo:hi] = (peak + np.log(mass)).reshape(shape)
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """Gradients dq (B,H,T,D), dk and dv (B,G,S,D) of flash_attention's out along dout."""
    _check(q, k, v, tile)
    if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError("dout and out must have the shape of q, and lse its first three axes")
    for name, array in (("dout", dout), ("out", out), ("lse", lse)):
        _check_dtype(name, array)
    batch, heads, length, width = q.shape
    groups, keys = k.shape[1:3]
    repeats = heads // groups
    scale = width**-0.5
    shift = keys - length
    dq = np.zeros(q.shape, dtype=q.dtype)
    dk = np.zeros(k.shape, dtype=q.dtype)
    dv = np.zeros(v.shape, dtype=q.dtype)
    q5, dout5, dq5 = _fold(q, groups), _fold(dout, groups), _fold(dq, groups)
    lse4 = _fold(lse, groups)
    delta4 = _fold(np.einsum("bhtd,bhtd->bht", dout, out), groups)

    for left, right in _spans(0, keys, tile):
        keys_here = k[:, :, left:right]
        values_here = v[:, :, left:right]
        first = max(0, left - shift) if causal else 0
        for lo, hi in _spans(first, length, tile):
            queries = _rows(q5[:, :, :, lo:hi]) * scale
            grads = _rows(dout5[:, :, :, lo:hi])
            norm = _rows(lse4[:, :, :, lo:hi])[..., None]
            delta = _rows(delta4[:, :, :, lo:hi])[..., None]
            gap = queries @ keys_here.swapaxes(2, 3) - norm
            weights = np.exp(np.minimum(gap, 0, out=gap), out=gap)
            hidden = _hidden((lo, hi), (left, right), shift, repeats) if causal else None
            if hidden is not None:
                weights[..., hidden] = 0
            dv[:, :, left:right] += weights.swapaxes(2, 3) @ grads
            dscores = grads @ values_here.swapaxes(2, 3)
            dscores -= delta
            dscores *= weights
            dk[:, :, left:right] += dscores.swapaxes(2, 3) @ queries
            part = (dscores @ keys_here) * scale
            dq5[:, :, :, lo:hi] += part.reshape(batch, groups, repeats, hi - lo, width)
    return dq, dk, dv
