"""Keys in the outer loop, all heads of all batches at once: partial sums live for every query."""

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """out (B,H,T,D) and lse (B,H,T) of q (B,H,T,D) over k, v (B,G,S,D)."""
    _validate(q, k, v, tile)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    dtype = q.dtype
    queries = q.reshape(B, G, H // G, T, D)
    maxima = np.full((B, G, H // G, T, 1), -np.inf, dtype)
    sums = np.zeros((B, G, H // G, T, 1), dtype)
    outputs = np.zeros((B, G, H // G, T, D), dtype)
    scale = dtype.type(1 / D**0.5)
    # From the last tile of keys to the first: under a causal mask most queries start out masked.
    for first in reversed(range(0, S, tile)):
        keys = k[:, :, None, first : first + tile].swapaxes(-1, -2)
        values = v[:, :, None, first : first + tile]
        for top in range(0, T, tile):
            bottom = min(top + tile, T)
            if causal and first > bottom - 1 + S - T:
                continue
            part = (Ellipsis, slice(top, bottom), slice(None))
            scores = np.matmul(queries[part], keys) * scale
            if causal:
                key_index = first + np.arange(scores.shape[-1])
                allowed = key_index <= np.arange(top, bottom)[:, None] + (S - T)
                scores = np.where(allowed, scores, dtype.type(-np.inf))
            _merge(maxima[part], sums[part], outputs[part], scores, values)
    nothing = sums == 0
    sums[nothing] = 1
    outputs /= sums
    lse = np.log(sums) + np.where(nothing, dtype.type(-np.inf), maxima)
    return outputs.reshape(B, H, T, D), lse.reshape(B, H, T)


def _merge(maxima, sums, outputs, scores, values):
    """Merges one block into the running state, which is updated in place."""
    peak = scores.max(axis=-1, keepdims=True)
    higher = np.maximum(maxima, peak)
    live = np.isfinite(higher)
    anchor = np.where(live, higher, higher.dtype.type(0))
    old_factor = np.exp(maxima - anchor)
    block = np.exp(scores - anchor)
    sums *= old_factor
    sums += block.sum(axis=-1, keepdims=True)
    outputs *= old_factor
    outputs += np.matmul(block, values)
    maxima[...] = higher


def _validate(q, k, v, tile):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray) or not np.issubdtype(x.dtype, np.floating):
            raise TypeError(f"{name} must be a floating-point array")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions")
    if k.shape != v.shape:
        raise ValueError("k and v differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError("q and k differ in batch or width")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError("H must be a multiple of G")
    if tile < 1:
        raise ValueError("tile must be positive")
