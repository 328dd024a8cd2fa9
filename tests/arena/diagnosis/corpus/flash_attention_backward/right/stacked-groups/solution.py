"""Flash attention, forward and backward, in tiles, with the query heads of a group folded into rows.

All query heads that read one key/value head are stacked into the rows of one matrix, so that every tile
is a single batched product (B, G, heads * queries, D) @ (B, G, D, keys), and the sum of dk and dv over
the heads of a group happens inside the product.  Queries that see no key are cut off beforehand: they
take no part in any arithmetic.
"""

import operator
from collections.abc import Iterator

import numpy as np

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    tile = _check_tile(tile)
    _check_qkv(q, k, v)
    queries, keys, width = q.shape[2], k.shape[2], q.shape[3]
    groups = k.shape[1]
    out = np.zeros(q.shape, dtype=q.dtype)
    lse = np.full(q.shape[:3], -np.inf, dtype=q.dtype)
    q_split, out_split, lse_split = (_split_heads(x, groups) for x in (q, out, lse))

    with np.errstate(over="ignore", under="ignore"):
        for t0, t1 in _spans(_first_seeing(queries, keys, causal), queries, tile):
            q_tile = _fold(q_split, t0, t1) * width**-0.5
            peak = np.full((*q_tile.shape[:-1], 1), -np.inf, dtype=q.dtype)
            total = np.zeros_like(peak)
            acc = np.zeros_like(q_tile)
            for s0, s1 in _spans(0, _last_seen(t1, queries, keys, causal), tile):
                p = q_tile @ k[:, :, s0:s1].swapaxes(-1, -2)
                if causal:
                    _hide_later(p, t0, t1, s0, s1, keys - queries, -np.inf)
                new_peak = np.maximum(peak, p.max(axis=-1, keepdims=True))
                p -= new_peak
                np.exp(p, out=p)
                shrink = np.exp(peak - new_peak)
                total = total * shrink + p.sum(axis=-1, keepdims=True)
                acc = acc * shrink + p @ v[:, :, s0:s1]
                peak = new_peak
            if keys:
                out_split[:, :, :, t0:t1] = _unfold(acc / total, t1 - t0)
                lse_split[:, :, :, t0:t1] = _unfold(peak + np.log(total), t1 - t0)[..., 0]
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
    tile = _check_tile(tile)
    _check_qkv(q, k, v)
    _check_like(dout, "dout", q.shape, q.dtype)
    _check_like(out, "out", q.shape, q.dtype)
    _check_like(lse, "lse", q.shape[:3], q.dtype)
    queries, keys, width = q.shape[2], k.shape[2], q.shape[3]
    groups = k.shape[1]
    scale = width**-0.5
    dq = np.zeros(q.shape, dtype=q.dtype)
    dk = np.zeros(k.shape, dtype=k.dtype)
    dv = np.zeros(v.shape, dtype=v.dtype)
    q_split, dq_split, dout_split, out_split = (_split_heads(x, groups) for x in (q, dq, dout, out))
    lse_split = _split_heads(lse, groups)[..., None]

    with np.errstate(over="ignore", under="ignore"):
        for t0, t1 in _spans(_first_seeing(queries, keys, causal), queries, tile):
            q_tile = _fold(q_split, t0, t1) * scale
            dout_tile = _fold(dout_split, t0, t1)
            lse_tile = _fold(lse_split, t0, t1)
            delta = (dout_tile * _fold(out_split, t0, t1)).sum(axis=-1, keepdims=True)
            dq_tile = np.zeros_like(q_tile)
            for s0, s1 in _spans(0, _last_seen(t1, queries, keys, causal), tile):
                k_tile, v_tile = k[:, :, s0:s1], v[:, :, s0:s1]
                p = q_tile @ k_tile.swapaxes(-1, -2)
                p -= lse_tile
                # No probability exceeds 1; at huge scores the rounding of the saved lse says otherwise.
                np.minimum(p, 0, out=p)
                np.exp(p, out=p)
                if causal:
                    _hide_later(p, t0, t1, s0, s1, keys - queries, 0)
                ds = dout_tile @ v_tile.swapaxes(-1, -2)
                ds -= delta
                ds *= p
                dv[:, :, s0:s1] += p.swapaxes(-1, -2) @ dout_tile
                dk[:, :, s0:s1] += ds.swapaxes(-1, -2) @ q_tile
                dq_tile += ds @ k_tile
            dq_split[:, :, :, t0:t1] = _unfold(dq_tile * scale, t1 - t0)
    return dq, dk, dv


def _split_heads(x: np.ndarray, groups: int) -> np.ndarray:
    """View (B, H, ...) as (B, G, H/G, ...)."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, groups, heads // groups, *rest)


def _fold(x: np.ndarray, t0: int, t1: int) -> np.ndarray:
    """Queries t0..t1 of (B, G, R, T, D) as rows: (B, G, R * (t1 - t0), D)."""
    batch, groups, shared, _, width = x.shape
    return x[:, :, :, t0:t1].reshape(batch, groups, shared * (t1 - t0), width)


def _unfold(rows: np.ndarray, count: int) -> np.ndarray:
    """The inverse of _fold: (B, G, R * count, D) as (B, G, R, count, D)."""
    batch, groups, length, width = rows.shape
    return rows.reshape(batch, groups, length // count, count, width)


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Consecutive half-open spans of at most `step` from start to stop."""
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


def _first_seeing(queries: int, keys: int, causal: bool) -> int:
    """The first query that sees a key."""
    return max(0, queries - keys) if causal else 0


def _last_seen(t1: int, queries: int, keys: int, causal: bool) -> int:
    """One past the last key that the queries before t1 see."""
    return t1 + keys - queries if causal else keys


def _hide_later(
    scores: np.ndarray, t0: int, t1: int, s0: int, s1: int, offset: int, value: float
) -> None:
    """Write `value` where key j > t + offset, in scores (B, G, R * (t1 - t0), s1 - s0)."""
    if s1 - 1 <= t0 + offset:
        return
    later = np.arange(s0, s1) > np.arange(t0, t1)[:, None] + offset
    np.copyto(_unfold(scores, t1 - t0), value, where=later)


def _check_tile(tile: int) -> int:
    tile = operator.index(tile)
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    return tile


def _check_array(x: np.ndarray, name: str, axes: int) -> None:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be an array")
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32 or float64, not {x.dtype}")
    if x.ndim != axes:
        raise ValueError(f"{name} must have {axes} axes, not {x.ndim}")


def _check_like(x: np.ndarray, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    _check_array(x, name, len(shape))
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {x.shape}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, not {x.dtype}")


def _check_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    _check_array(q, "q", 4)
    _check_array(k, "k", 4)
    batch, heads, _, width = q.shape
    groups, keys = k.shape[1:3]
    if width == 0 or groups == 0:
        raise ValueError("the width and the number of key/value heads must not be 0")
    _check_like(k, "k", (batch, groups, keys, width), q.dtype)
    _check_like(v, "v", k.shape, q.dtype)
    if heads % groups:
        raise ValueError(f"{heads} query heads do not divide among {groups} key/value heads")
