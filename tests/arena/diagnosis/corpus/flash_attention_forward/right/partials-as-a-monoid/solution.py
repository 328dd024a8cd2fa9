"""Flash attention, forward, as a sum of mergeable partial answers.

Attention over some of the keys is a `Partial`: three numbers or vectors per query, from which output
and log-sum-exp follow. Two partials over different keys merge into one over all of them, and there
is a neutral one over no keys at all. So a query tile is answered by merging the partials of the key
tiles it sees; a query that sees nothing keeps the neutral element.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

WORK = np.float64  # everything is computed in it, one tile at a time


@dataclass(frozen=True)
class Partial:
    """Softmax attention over some keys, not yet normalised. With s the scaled scores:

    peak (..., T): the largest s, -inf without keys
    mass (..., T): the sum of exp(s - peak)
    mix (..., T, D): the sum of exp(s - peak) * value
    """

    peak: np.ndarray
    mass: np.ndarray
    mix: np.ndarray

    @classmethod
    def of_no_keys(cls, shape: tuple[int, ...]) -> Partial:
        """The neutral element for queries of this shape (..., T, D)."""
        return cls(np.full(shape[:-1], -np.inf), np.zeros(shape[:-1]), np.zeros(shape))

    @classmethod
    def of_tile(cls, scores: np.ndarray, values: np.ndarray) -> Partial:
        """From scores (..., T, S), -inf where hidden, and values (..., S, D). Overwrites scores."""
        peak = scores.max(axis=-1)
        scores -= _anchor(peak)[..., None]
        weights = np.exp(scores, out=scores)
        return cls(peak, weights.sum(axis=-1), weights @ values)

    def merge(self, other: Partial) -> Partial:
        """The partial over the keys of both."""
        peak = np.maximum(self.peak, other.peak)
        anchor = _anchor(peak)
        mine = np.exp(self.peak - anchor)
        theirs = np.exp(other.peak - anchor)
        mass = self.mass * mine + other.mass * theirs
        mix = self.mix * mine[..., None] + other.mix * theirs[..., None]
        return Partial(peak, mass, mix)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse); 0 and -inf where there were no keys."""
        divisor = np.where(self.mass == 0, 1, self.mass)
        return self.mix / divisor[..., None], self.peak + np.log(self.mass)


def _anchor(peak: np.ndarray) -> np.ndarray:
    """What to subtract in exponents: the peak, but 0 for -inf, because -inf - -inf is NaN."""
    return np.where(peak == -np.inf, 0, peak)


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    tile = operator.index(tile)
    _check(q, k, v, tile)

    out = np.empty(q.shape, dtype=q.dtype)
    lse = np.empty(q.shape[:3], dtype=q.dtype)
    if out.size == 0:
        return out, lse

    # Head h = g * (H/G) + r: splitting the axis gives every key/value head g its query heads.
    batch, heads, queries, width = q.shape
    groups = k.shape[1]
    grouped = (batch, groups, heads // groups, queries)
    q_split = q.reshape(*grouped, width)
    out_split = out.reshape(*grouped, width)
    lse_split = lse.reshape(grouped)
    k_split, v_split = k[:, :, None], v[:, :, None]

    # exp(-huge) = 0 and log(0) = -inf are wanted here.
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for first in range(0, queries, tile):
            rows = slice(first, min(first + tile, queries))
            answer = _attend(q_split[..., rows, :], k_split, v_split, rows if causal else None, tile, queries)
            out_split[..., rows, :], lse_split[..., rows] = answer.finish()
    return out, lse


def _attend(
    q_rows: np.ndarray, k: np.ndarray, v: np.ndarray, rows: slice | None, tile: int, queries: int
) -> Partial:
    """The partial of one query tile over all the keys it sees.

    `rows` says which of the `queries` these are if attention is causal, else it is None.
    """
    keys = k.shape[-2]
    scaled = q_rows.astype(WORK) * k.shape[-1] ** -0.5
    shift = keys - queries  # query t sees the keys up to t + shift
    stop = keys if rows is None else rows.stop + shift

    answer = Partial.of_no_keys(scaled.shape)
    for start in range(0, stop, tile):
        end = min(start + tile, stop)
        scores = scaled @ k[..., start:end, :].astype(WORK).swapaxes(-1, -2)
        if rows is not None and end - 1 > rows.start + shift:
            last_seen = np.arange(rows.start, rows.stop)[:, None] + shift
            scores[..., np.arange(start, end) > last_seen] = -np.inf
        answer = answer.merge(Partial.of_tile(scores, v[..., start:end, :].astype(WORK)))
    return answer


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Raise for whatever the contract does not allow."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.type not in (np.float32, np.float64):
            raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
