"""Exact attention by tiles: a softmax that is corrected as it goes, never a matrix of scores.

Axis letters: B batch, H query heads, G key/value heads, T queries, S keys, D width.
"""

import numpy as np


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    _check(q, k, v, tile)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    out = np.zeros((B, H, T, D), q.dtype)
    lse = np.zeros((B, H, T), q.dtype)
    for b, h in np.ndindex(B, H):
        g = h // (H // G)
        for start in range(0, T, tile):
            rows = slice(start, start + tile)
            out[b, h, rows], lse[b, h, rows] = _attend(
                q[b, h, rows], k[b, g], v[b, g], start + S - T, causal, tile
            )
    return out, lse


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, causal: bool, tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """One tile of queries q (rows, D), the first at key `position`, against all keys they see."""
    rows, D = q.shape
    q = q * D**-0.5
    peak = np.full(rows, -np.inf, q.dtype)
    total = np.zeros(rows, q.dtype)
    weighted = np.zeros((rows, D), q.dtype)
    stop = min(len(k), position + rows) if causal else len(k)
    for start in range(0, stop, tile):
        cols = slice(start, min(start + tile, stop))
        scores = q @ k[cols].T
        if causal and cols.stop > position + 1:
            scores[_hidden(position, rows, cols)] = -np.inf
        new_peak = np.maximum(peak, scores.max(axis=1))
        # A row that sees no key so far stays at -inf, and -inf - (-inf) is not a number.
        origin = np.where(new_peak == -np.inf, 0, new_peak)
        weights = np.exp(scores - origin[:, None])
        # What was summed up carries exp(-peak); turning it into exp(-new_peak) makes it smaller.
        correction = np.exp(peak - origin)
        total = total * correction + weights.sum(axis=1)
        weighted = weighted * correction[:, None] + weights @ v[cols]
        peak = new_peak
    seen = total > 0
    total = np.where(seen, total, 1)
    return weighted / total[:, None], np.where(seen, peak + np.log(total), -np.inf)


def _hidden(position: int, rows: int, cols: slice) -> np.ndarray:
    """True where a key lies behind its query: bool (rows, columns of the tile)."""
    return np.arange(cols.start, cols.stop) > np.arange(position, position + rows)[:, None]


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Refuses what cannot be meant."""
    if not all(isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in (q, k, v)):
        raise TypeError("q, k and v must be arrays of floats")
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must have four axes, got {q.shape} and {k.shape}")
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide over {k.shape[1]} key heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, got {tile}")
