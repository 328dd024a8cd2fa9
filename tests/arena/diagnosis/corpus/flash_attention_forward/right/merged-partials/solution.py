"""Flash attention, forward: partial softmaxes of key tiles, merged pair by pair.

What a tile of queries has learnt from some of the keys is a `Partial`. Partials of disjoint sets of
keys merge into the partial of their union, so attention is a fold of `_merge` over the key tiles.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Partial:
    """Softmax sums of some queries over some keys, relative to the greatest score seen.

    peak: greatest scaled score, -inf where no key was seen, (..., rows, 1).
    mass: sum of exp(score - peak), (..., rows, 1).
    blend: sum of exp(score - peak) * value, (..., rows, D).
    """

    peak: np.ndarray
    mass: np.ndarray
    blend: np.ndarray


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T).

    Query head h reads key/value head h // (H/G). With `causal` the last query sees all keys and
    every earlier one sees one key less. `tile` is how many queries and keys are handled at a time.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    tile = int(tile)
    _check(q, k, v, tile)
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:3], q.dtype)
    grouped = (batch, groups, heads // groups)
    lead = keys - queries  # query t sees the keys up to t + lead

    for first in range(0, queries, tile):
        past = min(first + tile, queries)
        rows = _contiguous(q, first, past).reshape(*grouped, past - first, width)
        key_end = min(past + lead, keys) if causal else keys
        partial = _nothing_seen(rows)
        for key_first in range(0, key_end, tile):
            key_past = min(key_first + tile, key_end)
            hidden = None
            if causal and key_past - 1 > first + lead:
                hidden = _hidden(first + lead, past + lead, key_first, key_past)
            seen = _attend(
                rows, _contiguous(k, key_first, key_past), _contiguous(v, key_first, key_past), hidden
            )
            partial = _merge(partial, seen)
        rows_out, rows_lse = _finish(partial)
        out[:, :, first:past] = rows_out.reshape(batch, heads, past - first, width)
        lse[:, :, first:past] = rows_lse.reshape(batch, heads, past - first)
    return out, lse


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Raise if the arguments are no attention problem."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must hold floats, not {array.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads do not share {k.shape[1]} key/value heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def _contiguous(array: np.ndarray, first: int, past: int) -> np.ndarray:
    """Positions first to past - 1 of every head, side by side in memory. May be a view."""
    return np.ascontiguousarray(array[:, :, first:past])


def _hidden(last_seen: int, past_seen: int, key_first: int, key_past: int) -> np.ndarray:
    """Which keys lie behind the last one a query sees, (rows, keys).

    The first query sees the keys up to `last_seen`, each further one sees one key more.
    """
    return np.arange(key_first, key_past) > np.arange(last_seen, past_seen)[:, None]


def _nothing_seen(rows: np.ndarray) -> Partial:
    """The partial of no keys at all: the neutral element of `_merge`."""
    column = (*rows.shape[:-1], 1)
    return Partial(
        peak=np.full(column, -np.inf, rows.dtype),
        mass=np.zeros(column, rows.dtype),
        blend=np.zeros(rows.shape, rows.dtype),
    )


def _attend(
    rows: np.ndarray, keys: np.ndarray, values: np.ndarray, hidden: np.ndarray | None
) -> Partial:
    """The partial of the queries `rows` (B,G,H/G,rows,D) over one tile of keys (B,G,keys,D)."""
    scores = rows @ keys[:, :, None].swapaxes(-1, -2)
    scores *= float(rows.shape[-1]) ** -0.5
    if hidden is not None:
        scores[..., hidden] = -np.inf
    peak = scores.max(axis=-1, keepdims=True)
    weights = _exp_below(scores, peak)
    return Partial(
        peak=peak,
        mass=weights.sum(axis=-1, keepdims=True),
        blend=weights @ values[:, :, None],
    )


def _merge(left: Partial, right: Partial) -> Partial:
    """The partial of the keys of `left` and `right` together."""
    peak = np.maximum(left.peak, right.peak)
    left_factor = _exp_below(left.peak, peak)
    right_factor = _exp_below(right.peak, peak)
    return Partial(
        peak=peak,
        mass=left.mass * left_factor + right.mass * right_factor,
        blend=left.blend * left_factor + right.blend * right_factor,
    )


def _exp_below(scores: np.ndarray, peak: np.ndarray) -> np.ndarray:
    """exp(scores - peak) for scores <= peak, and 0 where both are -inf."""
    shift = np.where(peak > -np.inf, peak, 0)
    with np.errstate(over="ignore", under="ignore"):  # far below the peak the weight is 0
        below = scores - shift
        return np.exp(below, out=below)


def _finish(partial: Partial) -> tuple[np.ndarray, np.ndarray]:
    """Output (..., rows, D) and log-sum-exp (..., rows); 0 and -inf where no key was seen."""
    blind = partial.mass == 0
    mass = np.where(blind, 1, partial.mass)
    lse = np.where(blind, -np.inf, partial.peak + np.log(mass))
    return partial.blend / mass, lse[..., 0]
