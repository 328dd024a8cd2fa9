"""Flash attention, forward and backward, in NumPy.

Grouped heads are folded away first: the R = H / G query heads that share a key/value head are interleaved into one
long list of rows, (B, H, T, D) -> (B, G, T·R, D), where row n is query n // R of the group's head n % R. What remains
is attention with one query list per key/value head, and the sum over a group's heads happens inside a matrix product.

Both passes then walk over the same schedule of tiles. Queries that see no key at all are the first ones, and the
schedule leaves them out: their results keep the values that the arrays are created with.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_FLOATS = (np.float32, np.float64)


class _Tile(NamedTuple):
    """One piece of work: these interleaved rows against these keys."""

    rows: slice
    keys: slice
    hidden: np.ndarray | None  # (rows, keys), True where a key is hidden; None where all are seen


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = (np.asarray(array) for array in (q, k, v))
    _check(q, k, v, tile)
    groups = k.shape[1]
    queries = _interleave(q, groups) * _scale(q)
    mixed = np.zeros_like(queries)  # Σ exp(score − peak) · v
    peak = np.full(queries.shape[:-1] + (1,), -np.inf, q.dtype)  # the largest score so far
    total = np.zeros(peak.shape, q.dtype)  # Σ exp(score − peak)
    blind = _blind_queries(q, k, causal) * (q.shape[1] // groups)

    with np.errstate(over="ignore", under="ignore"):
        for rows, keys, hidden in _schedule(q, k, causal, tile):
            scores = _scores(queries[:, :, rows], k[:, :, keys], hidden)
            higher = np.maximum(peak[:, :, rows], scores.max(axis=-1, keepdims=True))
            weights = np.exp(scores - higher)
            fade = np.exp(peak[:, :, rows] - higher)
            mixed[:, :, rows] = mixed[:, :, rows] * fade + weights @ v[:, :, keys]
            total[:, :, rows] = total[:, :, rows] * fade + weights.sum(axis=-1, keepdims=True)
            peak[:, :, rows] = higher

    seeing = slice(blind, None)
    mixed[:, :, seeing] /= total[:, :, seeing]
    peak[:, :, seeing] += np.log(total[:, :, seeing])
    return _separate(mixed, q.shape), _separate(peak, q.shape[:3] + (1,))[..., 0]


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
    dout, q, k, v, out, lse = (np.asarray(array) for array in (dout, q, k, v, out, lse))
    _check(q, k, v, tile)
    _check_saved(dout, q, out, lse)
    groups = k.shape[1]
    queries = _interleave(q, groups) * _scale(q)
    douts = _interleave(dout, groups)
    saved = _interleave(lse[..., None], groups)
    with np.errstate(over="ignore", under="ignore"):  # a blind query's dout may be huge: its row is never read
        drift = np.sum(douts * _interleave(out, groups), axis=-1, keepdims=True)
    dqueries = np.zeros_like(queries)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)

    with np.errstate(over="ignore", under="ignore"):
        for rows, keys, hidden in _schedule(q, k, causal, tile):
            exponents = _scores(queries[:, :, rows], k[:, :, keys], hidden)
            exponents -= saved[:, :, rows]
            np.minimum(exponents, 0, out=exponents)  # a probability is at most 1, however coarse lse was rounded
            weights = np.exp(exponents)
            dscores = douts[:, :, rows] @ _transposed(v[:, :, keys])
            dscores -= drift[:, :, rows]
            dscores *= weights
            if hidden is not None:
                np.copyto(dscores, 0, where=hidden)
            dv[:, :, keys] += _transposed(weights) @ douts[:, :, rows]
            dk[:, :, keys] += _transposed(dscores) @ queries[:, :, rows]
            dqueries[:, :, rows] += dscores @ k[:, :, keys]

    dqueries *= _scale(q)
    return _separate(dqueries, q.shape), dk, dv


def _scale(q: np.ndarray) -> float:
    return q.shape[-1] ** -0.5 if q.shape[-1] else 1.0


def _transposed(matrices: np.ndarray) -> np.ndarray:
    return matrices.swapaxes(-1, -2)


def _interleave(array: np.ndarray, groups: int) -> np.ndarray:
    """(B, H, T, X) -> (B, G, T·R, X): row n holds query n // R of the group's head n % R."""
    batch, heads, length, width = array.shape
    shared = heads // groups
    grouped = array.reshape(batch, groups, shared, length, width)
    return grouped.swapaxes(2, 3).reshape(batch, groups, length * shared, width)


def _separate(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What _interleave put together, back in the given shape (B, H, T, X)."""
    batch, heads, length, width = shape
    groups = rows.shape[1]
    grouped = rows.reshape(batch, groups, length, heads // groups, width)
    return grouped.swapaxes(2, 3).reshape(shape)


def _blind_queries(q: np.ndarray, k: np.ndarray, causal: bool) -> int:
    """How many queries, counted from the first, see no key."""
    queries, keys = q.shape[2], k.shape[2]
    if causal:
        return max(0, queries - keys)
    return 0 if keys else queries


def _schedule(q: np.ndarray, k: np.ndarray, causal: bool, tile: int) -> Iterator[_Tile]:
    """All tiles in which a query sees a key, as slices of interleaved rows and of keys."""
    queries, keys = q.shape[2], k.shape[2]
    shared = q.shape[1] // k.shape[1]
    ahead = keys - queries if causal else keys  # query t sees the keys j <= t + ahead
    for first in range(_blind_queries(q, k, causal), queries, tile):
        last = min(first + tile, queries)
        rows = slice(first * shared, last * shared)
        end = min(last + ahead, keys)  # no query of these sees a key from here on
        for start in range(0, end, tile):
            stop = min(start + tile, end)
            hidden = None
            if stop - 1 > first + ahead:
                seen_until = np.repeat(np.arange(first, last), shared) + ahead
                hidden = np.arange(start, stop) > seen_until[:, None]
            yield _Tile(rows, slice(start, stop), hidden)


def _scores(queries: np.ndarray, keys: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
    """Scores of scaled queries, −inf where a key is hidden."""
    scores = queries @ _transposed(keys)
    if hidden is not None:
        np.copyto(scores, -np.inf, where=hidden)
    return scores


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.type not in _FLOATS or array.dtype != q.dtype:
            raise TypeError(f"{name} must be float32 or float64 like the others, not {array.dtype}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have four axes, not {array.ndim}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def _check_saved(dout: np.ndarray, q: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
    for name, array, shape in (("dout", dout, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:3])):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} like q, not {array.dtype}")
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
