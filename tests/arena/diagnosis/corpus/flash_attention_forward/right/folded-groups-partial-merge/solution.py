"""Flash attention, forward: exact softmax attention, tile by tile. The contract is in prompt.md.

The query heads that share a key/value head are folded into the rows of one matrix product. Every
pair of a query tile and a key tile gives a *partial* result (peak, weight sum, weighted values);
partials are merged into one, which is normalised when all visible keys have been seen.
"""

import operator
from typing import NamedTuple

import numpy as np

FLOAT_SIZES = (4, 8)


class Partial(NamedTuple):
    """Attention over some of the keys, not normalised yet; weights are relative to exp(peak)."""

    peak: np.ndarray  # (B, G, R, t), -inf where no key was seen
    total: np.ndarray  # (B, G, R, t), sum of the weights
    values: np.ndarray  # (B, G, R, t, D), weighted sum of the values


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v, tile = check_inputs(q, k, v, tile)
    batch, heads, n_queries, width = q.shape
    groups, n_keys = k.shape[1:3]
    shared = heads // groups
    grouped_q = fold_heads(q, groups)
    out = np.zeros((batch, groups, shared, n_queries, width), dtype=q.dtype)
    lse = np.full((batch, groups, shared, n_queries), -np.inf, dtype=q.dtype)
    ahead = n_keys - n_queries  # query t sees the keys j <= t + ahead

    with np.errstate(over="ignore", under="ignore"):
        for first in range(0, n_queries, tile):
            last = min(first + tile, n_queries)
            stop = min(n_keys, last + ahead) if causal else n_keys
            if stop <= 0:
                continue
            queries = np.array(grouped_q[:, :, :, first:last], dtype=native(q.dtype), order="C")
            state = empty_partial(queries)
            for start in range(0, stop, tile):
                end = min(start + tile, stop)
                hidden = None
                if causal and end - 1 > first + ahead:
                    hidden = hidden_keys(first + ahead, last - first, start, end)
                part = attend(queries, k[:, :, start:end], v[:, :, start:end], hidden)
                state = merge(state, part)
            out[:, :, :, first:last], lse[:, :, :, first:last] = finish(state)

    return unfold_heads(out), unfold_heads(lse)


def check_inputs(q, k, v, tile):
    """The inputs as arrays and an int; raises ValueError or TypeError where they do not fit."""
    tile = operator.index(tile)
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    q, k, v = (np.asarray(array) for array in (q, k, v))
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.kind != "f" or array.dtype.itemsize not in FLOAT_SIZES:
            raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    if native(q.dtype) != native(k.dtype) or native(q.dtype) != native(v.dtype):
        raise TypeError("q, k and v must have one dtype")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} must have one shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    return q, k, v, tile


def native(dtype):
    """The dtype in this machine's byte order."""
    return dtype.newbyteorder("=")


def fold_heads(array, groups):
    """(B, H, T, D) as (B, G, H/G, T, D): query head h belongs to key head h // (H/G)."""
    batch, heads, rows, width = array.shape
    return array.reshape(batch, groups, heads // groups, rows, width)


def unfold_heads(array):
    """(B, G, R, ...) as (B, G*R, ...)."""
    batch, groups, shared = array.shape[:3]
    return array.reshape(batch, groups * shared, *array.shape[3:])


def hidden_keys(reach, rows, start, end):
    """Bool (rows, end-start): keys that row r, which sees the keys j <= reach + r, must not see."""
    return np.arange(start, end) > (reach + np.arange(rows))[:, None]


def empty_partial(queries):
    """The neutral element of merge for these queries (B, G, R, t, D)."""
    peak = np.full(queries.shape[:-1], -np.inf, dtype=queries.dtype)
    total = np.zeros(queries.shape[:-1], dtype=queries.dtype)
    values = np.zeros(queries.shape, dtype=queries.dtype)
    return Partial(peak, total, values)


def batched_product(rows, matrix):
    """(B, G, R, t, n) times (B, G, n, m), one large product for each key/value head."""
    batch, groups, shared, height, inner = rows.shape
    flat = rows.reshape(batch, groups, shared * height, inner)
    return (flat @ matrix).reshape(batch, groups, shared, height, matrix.shape[-1])


def attend(queries, keys, values, hidden):
    """The partial result of the queries over one tile of keys and values (B, G, s, D)."""
    keys = np.ascontiguousarray(keys, dtype=queries.dtype)
    values = np.ascontiguousarray(values, dtype=queries.dtype)
    scores = batched_product(queries, keys.swapaxes(-1, -2))
    scores *= softmax_scale(queries)
    if hidden is not None:
        scores[..., hidden] = -np.inf
    peak = scores.max(axis=-1)
    scores -= finite_peak(peak)[..., None]
    weights = np.exp(scores, out=scores)
    return Partial(peak, weights.sum(axis=-1), batched_product(weights, values))


def softmax_scale(queries):
    """D^-1/2 as a Python float, which does not change an array's dtype."""
    return max(queries.shape[-1], 1) ** -0.5


def finite_peak(peak):
    """The peak, or 0 where no key was seen, so that -inf is never taken from -inf."""
    return np.where(np.isneginf(peak), 0, peak).astype(peak.dtype, copy=False)


def merge(left, right):
    """The partial result over the keys of both."""
    peak = np.maximum(left.peak, right.peak)
    base = finite_peak(peak)
    left_factor = np.exp(left.peak - base)
    right_factor = np.exp(right.peak - base)
    total = left.total * left_factor + right.total * right_factor
    values = left.values * left_factor[..., None]
    values += right.values * right_factor[..., None]
    return Partial(peak, total, values)


def finish(state):
    """Normalised output and log-sum-exp; 0 and -inf where no key was seen."""
    blind = np.isneginf(state.peak)
    total = np.where(blind, 1, state.total)
    out = state.values / total[..., None]
    lse = state.peak + np.log(total)
    return out, lse
