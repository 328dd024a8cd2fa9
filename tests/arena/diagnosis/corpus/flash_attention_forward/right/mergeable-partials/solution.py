"""Flash attention, forward, as a fold over mergeable partial softmaxes (the "split-K" view).

Attention over a set of keys is summed up in a `Partial`; the partials of two disjoint key sets merge into
that of their union, and `_nothing` is the neutral element. A query tile folds the partials of its key tiles.
"""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np


class Partial(NamedTuple):
    """Softmax over some keys, not yet normalised, for a tile of queries of all heads."""

    peak: np.ndarray  # (B,G,R,t) largest score, -inf where no key is seen
    mass: np.ndarray  # (B,G,R,t) sum of exp(score - peak)
    value: np.ndarray  # (B,G,R,t,D) sum of exp(score - peak) * v


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _check(q, k, v, tile)
    queries, keys, groups = q.shape[2], k.shape[2], k.shape[1]
    offset = keys - queries
    scale = q.shape[3] ** -0.5

    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:3], q.dtype)
    q_grouped, out_grouped, lse_grouped = (_by_group(array, groups) for array in (q, out, lse))

    def visible(rows: slice, cols: slice) -> np.ndarray:
        """Which of these queries see which of these keys, (t,s)."""
        last_seen = np.arange(rows.start, rows.stop) + offset
        return np.arange(cols.start, cols.stop) <= last_seen[:, None]

    def partials(rows: slice) -> Iterator[Partial]:
        """The partial of each key tile that some query of `rows` sees."""
        q_tile = q_grouped[..., rows, :] * scale
        seen = min(rows.stop + offset, keys) if causal else keys
        for cols in _tiles(seen, tile):
            partly_hidden = causal and cols.stop > rows.start + offset + 1
            mask = visible(rows, cols) if partly_hidden else None
            yield _partial(q_tile, k[:, :, None, cols], v[:, :, None, cols], mask)

    with np.errstate(over="ignore", under="ignore"):
        for rows in _tiles(queries, tile):
            blank = _nothing(out_grouped[..., rows, :])
            total = reduce(_merge, partials(rows), blank)
            out_grouped[..., rows, :], lse_grouped[..., rows] = _finish(total)
    return out, lse


def _partial(q_tile: np.ndarray, k_tile: np.ndarray, v_tile: np.ndarray, mask: np.ndarray | None) -> Partial:
    """The partial of one tile of keys, for scaled queries."""
    scores = q_tile @ k_tile.swapaxes(-1, -2)
    if mask is not None:
        np.copyto(scores, -np.inf, where=~mask)
    peak = scores.max(axis=-1, initial=-np.inf)
    weights = np.exp(scores - _finite(peak)[..., None])
    return Partial(peak, weights.sum(axis=-1), weights @ v_tile)


def _nothing(like: np.ndarray) -> Partial:
    """The partial over no key at all, for queries of the shape and dtype of `like` (...,t,D)."""
    rows = like.shape[:-1]
    return Partial(np.full(rows, -np.inf, like.dtype), np.zeros(rows, like.dtype), np.zeros(like.shape, like.dtype))


def _merge(left: Partial, right: Partial) -> Partial:
    """The partial over the keys of both."""
    peak = np.maximum(left.peak, right.peak)
    base = _finite(peak)
    of_left, of_right = np.exp(left.peak - base), np.exp(right.peak - base)
    return Partial(
        peak,
        left.mass * of_left + right.mass * of_right,
        left.value * of_left[..., None] + right.value * of_right[..., None],
    )


def _finish(total: Partial) -> tuple[np.ndarray, np.ndarray]:
    """Normalised output and log-sum-exp; 0 and -inf for queries that saw no key."""
    sees = total.mass > 0
    mass = np.where(sees, total.mass, np.ones_like(total.mass))
    lse = total.peak + np.log(mass)
    lse[~sees] = -np.inf
    return total.value / mass[..., None], lse


def _finite(peak: np.ndarray) -> np.ndarray:
    """The peak, with 0 in place of -inf, so that -inf minus it stays -inf."""
    return np.where(np.isneginf(peak), np.zeros_like(peak), peak)


def _by_group(array: np.ndarray, groups: int) -> np.ndarray:
    """A view of (B,H,...) as (B,G,H/G,...)."""
    batch, heads = array.shape[:2]
    return array.reshape(batch, groups, heads // groups, *array.shape[2:])


def _tiles(stop: int, tile: int) -> Iterator[slice]:
    """Consecutive slices of at most `tile` that cover 0 to `stop`."""
    for start in range(0, stop, tile):
        yield slice(start, min(start + tile, stop))


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Refuse what the contract refuses."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not np.issubdtype(array.dtype, np.floating):
            raise TypeError(f"{name} must be of a real float dtype, not {array.dtype}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} must have one shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and width")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} groups")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
