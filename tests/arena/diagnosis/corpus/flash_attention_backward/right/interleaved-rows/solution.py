"""Flash attention, forward and backward. The contract is in prompt.md.

All work is done on interleaved rows: the R = H / G query heads that share a key/value head are woven
into one list of T * R rows, so that row r is the query at position r // R. Queries become (B*G, T*R, D),
keys (B*G, S, D); every product is a plain stack of matrices, a range of positions is one slice of rows,
and the sum over the heads of a group happens inside the products for dk and dv.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Geometry:
    """The sizes of one problem and the way its scores are cut into tiles."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    causal: bool
    tile: int

    @property
    def weave(self) -> int:
        """Query heads per key/value head, which is rows per query position."""
        return self.heads // self.groups

    @property
    def scale(self) -> float:
        """What the scores are multiplied by."""
        return self.width**-0.5

    @property
    def offset(self) -> int:
        """Causal query t sees the keys up to t + offset."""
        return self.keys - self.queries

    def query_tiles(self) -> Iterator[range]:
        """Ranges of the query positions that see a key at all; the blind ones are never visited."""
        blind = 0
        if self.keys == 0:
            blind = self.queries
        elif self.causal:
            blind = max(0, -self.offset)
        return _ranges(blind, self.queries, self.tile)

    def key_tiles(self, queries: range) -> Iterator[range]:
        """Ranges of the key positions that some of the queries see; the first holds key 0."""
        end = self.keys
        if self.causal:
            end = queries.stop + self.offset
        return _ranges(0, end, self.tile)

    def rows(self, queries: range) -> slice:
        """The rows of a range of query positions."""
        return slice(queries.start * self.weave, queries.stop * self.weave)

    def hide(self, scores: np.ndarray, queries: range, keys: range) -> None:
        """Set the scores of later keys to -inf, in place."""
        if not self.causal or keys.stop - 1 <= queries.start + self.offset:
            return
        positions = np.repeat(np.arange(queries.start, queries.stop), self.weave)
        later = np.arange(keys.start, keys.stop) > positions[:, None] + self.offset
        scores[:, later] = -np.inf

    def woven(self, array: np.ndarray) -> np.ndarray:
        """(B, H, T, ...) as rows (B*G, T*R, ...); may be a view."""
        rest = array.shape[3:]
        apart = array.reshape(self.batch, self.groups, self.weave, self.queries, *rest)
        return apart.swapaxes(2, 3).reshape(self.batch * self.groups, self.queries * self.weave, *rest)

    def unwoven(self, rows: np.ndarray) -> np.ndarray:
        """Rows (B*G, T*R, ...) as (B, H, T, ...)."""
        rest = rows.shape[2:]
        apart = rows.reshape(self.batch, self.groups, self.queries, self.weave, *rest)
        return apart.swapaxes(2, 3).reshape(self.batch, self.heads, self.queries, *rest)

    def stacked(self, array: np.ndarray) -> np.ndarray:
        """(B, G, S, D) as (B*G, S, D); may be a view."""
        return array.reshape(self.batch * self.groups, self.keys, self.width)


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    geometry = _checked_geometry(q, k, v, causal, tile)
    query_rows = geometry.woven(q) * geometry.scale
    key_rows, value_rows = geometry.stacked(k), geometry.stacked(v)
    out = np.zeros(query_rows.shape, q.dtype)
    lse = np.full(query_rows.shape[:2], -np.inf, q.dtype)
    for queries in geometry.query_tiles():
        rows = geometry.rows(queries)
        # The softmax seen so far: its largest score, the sum of its exponentials, the weighted values.
        peak = np.full(lse[:, rows].shape, -np.inf, q.dtype)
        total = np.zeros(peak.shape, q.dtype)
        weighted = np.zeros(out[:, rows].shape, q.dtype)
        for keys in geometry.key_tiles(queries):
            span = slice(keys.start, keys.stop)
            scores = query_rows[:, rows] @ key_rows[:, span].mT
            geometry.hide(scores, queries, keys)
            new_peak = np.maximum(peak, scores.max(axis=-1))
            shrink = np.exp(peak - new_peak)
            scores -= new_peak[..., None]
            weights = np.exp(scores, out=scores)
            total = total * shrink + weights.sum(axis=-1)
            weighted *= shrink[..., None]
            weighted += weights @ value_rows[:, span]
            peak = new_peak
        out[:, rows] = weighted / total[..., None]
        lse[:, rows] = peak + np.log(total)
    return geometry.unwoven(out), geometry.unwoven(lse)


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
    geometry = _checked_geometry(q, k, v, causal, tile)
    _check_like("dout", dout, q.shape)
    _check_like("out", out, q.shape)
    _check_like("lse", lse, q.shape[:3])
    query_rows = geometry.woven(q) * geometry.scale
    key_rows, value_rows = geometry.stacked(k), geometry.stacked(v)
    dout_rows, lse_rows = geometry.woven(dout), geometry.woven(lse)
    # The derivative of the softmax subtracts the mean of dout · v under the weights, which is dout · out.
    mean = np.einsum("nrd,nrd->nr", dout_rows, geometry.woven(out))
    dq = np.zeros(query_rows.shape, q.dtype)
    dk = np.zeros(key_rows.shape, q.dtype)
    dv = np.zeros(value_rows.shape, q.dtype)
    for queries in geometry.query_tiles():
        rows = geometry.rows(queries)
        query_tile, dout_tile = query_rows[:, rows], dout_rows[:, rows]
        for keys in geometry.key_tiles(queries):
            span = slice(keys.start, keys.stop)
            scores = query_tile @ key_rows[:, span].mT
            geometry.hide(scores, queries, keys)
            scores -= lse_rows[:, rows, None]
            # A weight is at most 1; a saved lse that is rounded may lie far below a huge score.
            np.minimum(scores, 0, out=scores)
            weights = np.exp(scores, out=scores)
            dv[:, span] += weights.mT @ dout_tile
            dscores = dout_tile @ value_rows[:, span].mT
            dscores -= mean[:, rows, None]
            dscores *= weights
            dq[:, rows] += dscores @ key_rows[:, span]
            dk[:, span] += dscores.mT @ query_tile
    dq *= geometry.scale
    return geometry.unwoven(dq), dk.reshape(k.shape), dv.reshape(v.shape)


def _ranges(start: int, stop: int, step: int) -> Iterator[range]:
    """start..stop in consecutive ranges of `step`, the last one possibly shorter."""
    for first in range(start, stop, step):
        yield range(first, min(first + step, stop))


def _checked_geometry(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, tile: int) -> Geometry:
    """The sizes of a problem, or ValueError or TypeError where they do not fit each other."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        _check_floats(name, array)
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    _check_like("k", k, (batch, groups, keys, width))
    _check_like("v", v, k.shape)
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key/value heads evenly")
    size = operator.index(tile)
    if size < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    return Geometry(batch, heads, groups, queries, keys, width, bool(causal), size)


def _check_floats(name: str, array: np.ndarray) -> None:
    """Raise TypeError unless `array` is an array of real floats."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise TypeError(f"{name} must be an array of floats")


def _check_like(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless `array` is one of real floats and of this shape."""
    _check_floats(name, array)
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")
