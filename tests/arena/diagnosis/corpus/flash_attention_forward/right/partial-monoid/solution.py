"""Flash attention, forward, as a fold over key tiles.

What a group of queries knows after some of the keys is a `Partial`.  Partials of disjoint sets of keys
are joined by `merge`, which is associative and has a neutral element, so attention is one `reduce`.
"""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np


class Partial(NamedTuple):
    """Attention of some queries over some keys, not yet normalised."""

    peak: np.ndarray  # (..., rows, 1) the largest score seen, -inf where no key was seen
    mass: np.ndarray  # (..., rows, 1) the sum of exp(score - peak)
    blend: np.ndarray  # (..., rows, D) the sum of exp(score - peak) * value


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _check(q, k, v, tile)
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]

    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)

    # An axis for the heads of one group: query head h is (h // (H/G), h % (H/G)).
    split = (batch, groups, heads // groups)
    grouped_q = q.reshape(*split, queries, width)
    grouped_out = out.reshape(*split, queries, width)
    grouped_lse = lse.reshape(*split, queries)
    shared_k, shared_v = k[:, :, None], v[:, :, None]

    scale = width**-0.5 if width else 1.0
    shift = keys - queries  # causal: query t sees the keys j <= t + shift
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for start in range(0, queries, tile):
            stop = min(start + tile, queries)
            window = slice(start, stop)
            rows = grouped_q[..., window, :] * q.dtype.type(scale)
            horizon = start + shift if causal else None
            partials = _partials(rows, shared_k, shared_v, tile, horizon)
            total = reduce(merge, partials, _nothing(rows))
            _settle(total, grouped_out[..., window, :], grouped_lse[..., window])
    return out, lse


def merge(left: Partial, right: Partial) -> Partial:
    """What is known after the keys of both."""
    peak = np.maximum(left.peak, right.peak)
    anchor = _anchor(peak)
    keep_left = np.exp(left.peak - anchor)
    keep_right = np.exp(right.peak - anchor)
    return Partial(
        peak,
        left.mass * keep_left + right.mass * keep_right,
        left.blend * keep_left + right.blend * keep_right,
    )


def _nothing(rows: np.ndarray) -> Partial:
    """The neutral element of `merge`: no keys seen."""
    column = (*rows.shape[:-1], 1)
    return Partial(
        np.full(column, -np.inf, rows.dtype), np.zeros(column, rows.dtype), np.zeros_like(rows)
    )


def _partials(
    rows: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int, horizon: int | None
) -> Iterator[Partial]:
    """One partial for each key tile that any of the rows sees.

    `horizon` is the last key that the first row sees (it may be negative); each further row sees one
    more.  None: every row sees every key.
    """
    count, keys = rows.shape[-2], k.shape[-2]
    end = keys if horizon is None else min(keys, horizon + count)
    for first in range(0, end, tile):
        last = min(first + tile, end)
        scores = rows @ k[..., first:last, :].swapaxes(-1, -2)
        if horizon is not None and last - 1 > horizon:
            hidden = np.arange(first, last) > horizon + np.arange(count)[:, None]
            np.copyto(scores, -np.inf, where=hidden)
        yield _partial(scores, v[..., first:last, :])


def _partial(scores: np.ndarray, values: np.ndarray) -> Partial:
    """The partial of one tile; `scores` is used up."""
    peak = scores.max(axis=-1, keepdims=True)
    scores -= _anchor(peak)
    weights = np.exp(scores, out=scores)
    return Partial(peak, weights.sum(axis=-1, keepdims=True), weights @ values)


def _anchor(peak: np.ndarray) -> np.ndarray:
    """What to subtract from scores: the peak, or 0 where nothing was seen (-inf - -inf is NaN)."""
    return np.where(np.isneginf(peak), peak.dtype.type(0), peak)


def _settle(total: Partial, out: np.ndarray, lse: np.ndarray) -> None:
    """Normalise into `out` and `lse`; queries that saw nothing get 0 and -inf."""
    seen = total.mass > 0
    np.divide(total.blend, total.mass, out=out, where=seen)
    lse[...] = (total.peak + np.log(total.mass))[..., 0]


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must be real floating point, not {array.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    heads, groups = q.shape[1], k.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads are not a multiple of {groups} key/value heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
