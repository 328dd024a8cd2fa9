"""Flash attention, forward: all heads of a group folded into the row axis, a tile after another."""

import numpy as np


def _checked(q, k, v, tile):
    """Raise on bad input; answer the three arrays."""
    arrays = q, k, v = tuple(np.asarray(a) for a in (q, k, v))
    for name, a in zip("qkv", arrays, strict=False):
        if a.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {a.ndim}")
        if a.dtype.kind != "f":
            raise TypeError(f"{name} must be real floating point, not {a.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} does not fit k {k.shape}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} kv heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")
    return arrays


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = _checked(q, k, v, tile)
    B, H, T, D = q.shape
    G, S = k.shape[1:3]
    R = H // G
    out = np.zeros((B, H, T, D), q.dtype)
    lse = np.full((B, H, T), -np.inf, q.dtype)
    grouped = (B, G, R)
    shift = S - T

    for t0 in range(0, T, tile):
        t1 = min(t0 + tile, T)
        n = t1 - t0
        rows = (q[:, :, t0:t1] * D**-0.5).reshape(B, G, R * n, D)
        peak = np.full((B, G, R * n, 1), -np.inf, q.dtype)
        mass = np.zeros_like(peak)
        acc = np.zeros_like(rows)
        seen = max(0, min(S, t1 + shift)) if causal else S
        for s0 in range(0, seen, tile):
            s1 = min(s0 + tile, seen)
            scores = rows @ k[:, :, s0:s1].swapaxes(-1, -2)
            if causal and s1 - 1 > t0 + shift:
                hidden = np.arange(s0, s1) > np.arange(t0, t1)[:, None] + shift
                np.copyto(scores, -np.inf, where=np.tile(hidden, (R, 1)))
            new_peak = np.maximum(peak, scores.max(-1, keepdims=True))
            # A row that has seen nothing yet has peak -inf; 0 in its place avoids inf - inf.
            base = np.where(np.isneginf(new_peak), 0, new_peak).astype(q.dtype)
            with np.errstate(over="ignore"):
                scores -= base
                fade = np.exp(peak - base)
            np.exp(scores, out=scores)
            mass = mass * fade + scores.sum(-1, keepdims=True)
            acc = acc * fade + scores @ v[:, :, s0:s1]
            peak = new_peak
        some = mass > 0
        total = np.where(some, mass, 1).astype(q.dtype)
        out[:, :, t0:t1] = (acc / total).reshape(B, H, n, D)
        log = np.where(some, peak + np.log(total), -np.inf)
        lse[:, :, t0:t1] = log.reshape(*grouped, n).reshape(B, H, n)
    return out, lse
