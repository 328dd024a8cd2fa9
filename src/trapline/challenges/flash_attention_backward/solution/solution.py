"""Exact attention by tiles, forward and backward, never a matrix of scores.

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
    _check(q, k, v, tile)
    _check_saved(dout, q, out, lse)
    dout = _heard(dout, lse)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (q, k, v))
    # The sum over keys of weight times its gradient, for every row, without a sum over keys.
    delta = (dout * out).sum(axis=-1)
    for b, h in np.ndindex(B, H):
        g = h // (H // G)
        for start in range(0, S, tile):
            cols = slice(start, min(start + tile, S))
            for top in range(0, T, tile):
                rows = slice(top, min(top + tile, T))
                position = top + S - T
                if causal and position + rows.stop - top <= start:
                    continue  # these rows see none of these keys; later rows do
                weights = _weights(q[b, h, rows], k[b, g], lse[b, h, rows], position, cols, causal)
                dweights = dout[b, h, rows] @ v[b, g, cols].T
                dscores = weights * (dweights - delta[b, h, rows, None]) * D**-0.5
                dq[b, h, rows] += dscores @ k[b, g, cols]
                dk[b, g, cols] += dscores.T @ q[b, h, rows]
                dv[b, g, cols] += weights.T @ dout[b, h, rows]
    return dq, dk, dv


def _weights(
    q: np.ndarray, k: np.ndarray, lse: np.ndarray, position: int, cols: slice, causal: bool
) -> np.ndarray:
    """The softmax weights of one tile, made again from the saved log-sum-exp."""
    rows, D = q.shape
    scores = q @ k[cols].T * D**-0.5
    if causal:
        scores[_hidden(position, rows, cols)] = -np.inf
    # A row without keys has lse -inf, but all its scores are -inf too: any finite stand-in gives 0.
    finite = np.where(lse == -np.inf, 0, lse)
    # No weight exceeds 1, but lse and huge scores, rounded separately, may say so.
    return np.exp(np.minimum(scores - finite[:, None], 0))


def _heard(dout: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """dout with zeros where a row sees no key: what overflows there would meet 0 and be NaN."""
    return np.where(lse[..., None] == -np.inf, 0, dout)


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


def _check_saved(dout: np.ndarray, q: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
    """Refuses what cannot come from a forward pass with this q."""
    if not all(isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in (dout, out, lse)):
        raise TypeError("dout, out and lse must be arrays of floats")
    if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError(f"dout {dout.shape}, out {out.shape} or lse {lse.shape} does not fit q")
