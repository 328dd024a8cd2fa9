"""Flash attention, forward and backward, both driven by one schedule of tile pairs.

`_tile_pairs` lists the pairs (some queries, some keys) that have anything to do with each other; each pair is one
small problem whose scores are computed, used and dropped. The forward pass folds a pair into running statistics, the
backward pass adds a pair's share to the three gradients. Heads are split into (G, H/G) axes, so that a key/value head
broadcasts over its query heads and its gradients are a sum over one axis.
"""

import math
import operator
from collections.abc import Iterator

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    tile = operator.index(tile)
    _refuse_bad_input(q, k, v, tile)

    queries, keys, groups = q.shape[2], k.shape[2], k.shape[1]
    scale = _scale(q)
    q5 = _split_heads(q, groups)
    acc = np.zeros(q5.shape, dtype=q.dtype)
    peak = np.full((*q5.shape[:4], 1), -np.inf, dtype=q.dtype)
    total = np.zeros_like(peak)
    # Differences of huge scores may overflow to -inf, whose exponential, 0, is the right weight.
    with np.errstate(over="ignore", under="ignore"):
        for rows, columns, hidden in _tile_pairs(queries, keys, causal, tile):
            scores = _scores(q5[:, :, :, rows] * scale, k[:, :, None, columns], hidden)
            old = peak[:, :, :, rows]
            new = np.maximum(old, scores.max(axis=-1, keepdims=True))
            base = np.where(np.isneginf(new), 0, new)
            weights = np.exp(scores - base)
            shrink = np.exp(old - base)
            total[:, :, :, rows] *= shrink
            total[:, :, :, rows] += weights.sum(axis=-1, keepdims=True)
            acc[:, :, :, rows] *= shrink
            acc[:, :, :, rows] += weights @ v[:, :, None, columns]
            peak[:, :, :, rows] = new

    seeing = total > 0
    total[~seeing] = 1
    acc /= total
    lse = np.where(seeing, peak + np.log(total), -np.inf).astype(q.dtype, copy=False)
    return acc.reshape(q.shape), lse.reshape(q.shape[:3])


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
    dout, q, k, v, out, lse = (np.asarray(x) for x in (dout, q, k, v, out, lse))
    tile = operator.index(tile)
    _refuse_bad_input(q, k, v, tile)
    _refuse_bad_results(q, dout, out, lse)

    queries, keys, groups = q.shape[2], k.shape[2], k.shape[1]
    scale = _scale(q)
    q5, dout5, out5 = (_split_heads(x, groups) for x in (q, dout, out))
    lse5 = _split_heads(lse, groups)[..., None]
    # A query that sees nothing: +inf in place of -inf makes all its weights exp(-inf) = 0.
    lse5 = np.where(np.isneginf(lse5), np.inf, lse5).astype(q.dtype, copy=False)
    dq = np.zeros(q5.shape, dtype=q.dtype)
    dk = np.zeros(k.shape, dtype=q.dtype)
    dv = np.zeros(v.shape, dtype=q.dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # The row sums of weight * dweight, over all keys of a query.
        delta = np.einsum("bgrtd,bgrtd->bgrt", dout5, out5)[..., None]
        for rows, columns, hidden in _tile_pairs(queries, keys, causal, tile):
            scaled_q = q5[:, :, :, rows] * scale
            k_tile = k[:, :, None, columns]
            dout_tile = dout5[:, :, :, rows]

            # A weight is at most 1; the saved lse of a huge score may be rounded below the score computed here.
            exponent = _scores(scaled_q, k_tile, hidden) - lse5[:, :, :, rows]
            weights = np.exp(np.minimum(exponent, 0))
            dweights = dout_tile @ v[:, :, None, columns].swapaxes(-1, -2)
            # Where the weight is 0 the gradient is 0, even if dweights has overflowed.
            dscores = np.where(weights > 0, weights * (dweights - delta[:, :, :, rows]), 0)

            dq[:, :, :, rows] += (dscores @ k_tile) * scale
            dk[:, :, columns] += (dscores.swapaxes(-1, -2) @ scaled_q).sum(axis=2)
            dv[:, :, columns] += (weights.swapaxes(-1, -2) @ dout_tile).sum(axis=2)
    return dq.reshape(q.shape), dk, dv


def _tile_pairs(
    queries: int, keys: int, causal: bool, tile: int
) -> Iterator[tuple[slice, slice, np.ndarray | None]]:
    """Yields (queries, keys, hidden) for all pairs of tiles in which some query sees some key.

    `hidden` marks the hidden keys (rows x columns); None where all are seen.
    """
    ahead = keys - queries  # query t sees the keys up to t + ahead
    for column in range(0, keys, tile):
        columns = slice(column, min(column + tile, keys))
        for row in range(0, queries, tile):
            rows = slice(row, min(row + tile, queries))
            if causal and rows.stop - 1 + ahead < columns.start:
                continue
            hidden = None
            if causal and columns.stop - 1 > rows.start + ahead:
                last_seen = np.arange(rows.start, rows.stop) + ahead
                hidden = np.arange(columns.start, columns.stop) > last_seen[:, None]
            yield rows, columns, hidden


def _scores(scaled_q: np.ndarray, k_tile: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
    """Scaled scores (B,G,H/G,rows,columns), -inf where hidden."""
    scores = scaled_q @ k_tile.swapaxes(-1, -2)
    if hidden is not None:
        scores[..., hidden] = -np.inf
    return scores


def _scale(q: np.ndarray) -> float:
    return 1.0 / math.sqrt(q.shape[3])


def _split_heads(x: np.ndarray, groups: int) -> np.ndarray:
    """(B,H,...) seen as (B,G,H/G,...): query head h is member h % (H/G) of group h // (H/G)."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, groups, heads // groups, *x.shape[2:])


def _refuse_bad_input(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Raises ValueError or TypeError for what no attention can be computed of."""
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
        _refuse_dtype(name, array, q)
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} must have one shape")
    batch, heads, _, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if width == 0 or heads == 0 or k.shape[1] == 0:
        raise ValueError("width and numbers of heads must be at least 1")
    if heads % k.shape[1]:
        raise ValueError(f"{heads} query heads are no multiple of {k.shape[1]} key/value heads")


def _refuse_bad_results(q: np.ndarray, dout: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
    """Raises ValueError or TypeError where the backward pass's further inputs do not fit q."""
    for name, array, shape in (("dout", dout, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:3])):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
        _refuse_dtype(name, array, q)


def _refuse_dtype(name: str, array: np.ndarray, q: np.ndarray) -> None:
    if array.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if array.dtype != q.dtype:
        raise TypeError(f"{name} is {array.dtype}, but q is {q.dtype}")
