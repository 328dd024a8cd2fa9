"""Flash attention, forward: key tiles outside, query tiles inside.

Running statistics for every query. The query heads that share a key/value head get an axis of their
own, so that k and v broadcast and are never repeated.
"""

from collections.abc import Iterator

import numpy as np

ACCEPTED = (np.dtype(np.float32), np.dtype(np.float64))


class Running:
    """Largest score, sum of exponentials and weighted sum of values of every query, so far."""

    def __init__(self, lead: tuple[int, ...], count: int, width: int, dtype: np.dtype) -> None:
        self.peak = np.full((*lead, count), -np.inf, dtype=dtype)
        self.total = np.zeros((*lead, count), dtype=dtype)
        self.mixed = np.zeros((*lead, count, width), dtype=dtype)

    def absorb(self, rows: slice, scores: np.ndarray, values: np.ndarray) -> None:
        """Take in one tile of scores (..., rows, keys) and its values; overwrites `scores`."""
        before = self.peak[..., rows]
        after = np.maximum(before, scores.max(axis=-1))
        # A query that has seen nothing yet has the peak -inf; 0 stands in for it so that
        # -inf - -inf never happens.
        anchor = np.where(np.isneginf(after), 0, after).astype(scores.dtype, copy=False)
        fade = np.exp(before - anchor)
        scores -= anchor[..., None]
        weights = np.exp(scores, out=scores)
        self.total[..., rows] = self.total[..., rows] * fade + weights.sum(axis=-1)
        self.mixed[..., rows, :] *= fade[..., None]
        self.mixed[..., rows, :] += weights @ values
        self.peak[..., rows] = after

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Normalised output and log-sum-exp; 0 and -inf where nothing was seen."""
        blind = self.total == 0
        divisor = np.where(blind, 1, self.total).astype(self.total.dtype, copy=False)
        self.mixed /= divisor[..., None]
        return self.mixed, np.where(blind, -np.inf, self.peak + np.log(divisor)).astype(
            self.total.dtype, copy=False
        )


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
        if array.dtype not in ACCEPTED:
            raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError("q, k and v must have one dtype")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} do not fit")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")


def _spans(start: int, stop: int, step: int) -> Iterator[slice]:
    for low in range(start, stop, step):
        yield slice(low, min(low + step, stop))


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _check(q, k, v, tile)
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    lead = (batch, groups, heads // groups)
    shift = keys - queries  # query t sees the keys up to t + shift

    scaled = q.reshape(*lead, queries, width) * q.dtype.type(width**-0.5)
    running = Running(lead, queries, width, q.dtype)
    with np.errstate(over="ignore", under="ignore"):
        for cols in _spans(0, keys, tile):
            key_tile = k[:, :, None, cols].swapaxes(-1, -2)
            value_tile = v[:, :, None, cols]
            first = max(0, cols.start - shift) if causal else 0
            for rows in _spans(first, queries, tile):
                scores = scaled[..., rows, :] @ key_tile
                if causal and cols.stop - 1 > rows.start + shift:
                    hidden = (
                        np.arange(cols.start, cols.stop)
                        > np.arange(rows.start, rows.stop)[:, None] + shift
                    )
                    scores[..., hidden] = -np.inf
                running.absorb(rows, scores, value_tile)
        out, lse = running.finish()
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
