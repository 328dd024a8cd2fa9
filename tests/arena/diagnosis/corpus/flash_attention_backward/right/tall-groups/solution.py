"""Flash attention, forward and backward, with the query heads of a group stacked into one tall matrix.

The H/G query heads that share a key/value head are laid below each other, so that a tile of them is one
(heads · queries, D) matrix. One product then serves the whole group, and the sum over the heads of a group,
which `dk` and `dv` need, is the sum over rows that a matrix product takes anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plan:
    """The sizes of one checked problem, and who sees whom in it."""

    batch: int
    groups: int
    heads: int  # query heads of one group
    queries: int
    keys: int
    width: int
    causal: bool
    tile: int

    @property
    def scale(self) -> float:
        """What a product of query and key is multiplied by."""
        return self.width**-0.5

    @property
    def lead(self) -> int:
        """Query t sees the keys j <= t + lead, where attention is causal."""
        return self.keys - self.queries

    def query_tiles(self) -> Iterator[slice]:
        """Tiles of the queries that see at least one key. Key 0 is among those that they see."""
        blind = max(0, -self.lead) if self.causal else 0
        return tiles(blind if self.keys else self.queries, self.queries, self.tile)

    def key_tiles(self, rows: slice) -> Iterator[slice]:
        """Tiles of the keys that some query of `rows` sees."""
        return tiles(0, rows.stop + self.lead if self.causal else self.keys, self.tile)

    def fill_hidden(self, block: np.ndarray, rows: slice, columns: slice, value: float) -> None:
        """Overwrite the entries of a stacked (queries × keys) block that belong to hidden keys."""
        if self.causal and columns.stop - 1 > rows.start + self.lead:
            last_seen = np.arange(rows.start, rows.stop) + self.lead
            hidden = np.arange(columns.start, columns.stop) > last_seen[:, np.newaxis]
            by_head = block.reshape(self.batch, self.groups, self.heads, *hidden.shape)
            np.copyto(by_head, value, where=hidden)

    def by_group(self, array: np.ndarray) -> np.ndarray:
        """A view (B, G, H/G, ...) of an array (B, H, ...)."""
        return array.reshape(self.batch, self.groups, self.heads, *array.shape[2:])

    def stack(self, array: np.ndarray, rows: slice) -> np.ndarray:
        """The queries `rows` of an array (B, H, T, ...), heads of a group below each other."""
        part = self.by_group(array)[:, :, :, rows]
        return part.reshape(self.batch, self.groups, self.heads * part.shape[3], *array.shape[3:])

    def unstack(self, target: np.ndarray, rows: slice, stacked: np.ndarray) -> None:
        """Write stacked queries back to where `stack` took them from."""
        place = self.by_group(target)[:, :, :, rows]
        place[...] = stacked.reshape(place.shape)


def tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover the range from `start` to `stop`."""
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    plan = make_plan(q, k, v, causal, tile)
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    for rows in plan.query_tiles():
        queries = plan.stack(q, rows) * plan.scale
        peak = np.full(queries.shape[:-1], -np.inf, q.dtype)  # running maximum of the scores
        mass = np.zeros_like(peak)  # sum of exp(score - peak)
        mixed = np.zeros_like(queries)  # values weighted by exp(score - peak)
        for columns in plan.key_tiles(rows):
            weights = queries @ k[:, :, columns].swapaxes(2, 3)
            plan.fill_hidden(weights, rows, columns, -np.inf)
            risen = np.maximum(peak, weights.max(axis=-1))
            weights -= risen[..., np.newaxis]
            np.exp(weights, out=weights)
            fade = np.exp(peak - risen)
            mass = mass * fade + weights.sum(axis=-1)
            mixed *= fade[..., np.newaxis]
            mixed += weights @ v[:, :, columns]
            peak = risen
        plan.unstack(out, rows, mixed / mass[..., np.newaxis])
        plan.unstack(lse, rows, peak + np.log(mass))
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
    plan = make_plan(q, k, v, causal, tile)
    check_floats(dout=dout, out=out, lse=lse)
    if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError("dout and out must have the shape of q, and lse that of q without its last axis")
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    dq = np.zeros(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)
    for rows in plan.query_tiles():
        queries = plan.stack(q, rows) * plan.scale
        douts = plan.stack(dout, rows)
        levels = plan.stack(lse, rows)[..., np.newaxis]
        means = (douts * plan.stack(out, rows)).sum(axis=-1, keepdims=True)  # of dweights, over all keys
        dqueries = np.zeros_like(queries)
        for columns in plan.key_tiles(rows):
            weights = queries @ k[:, :, columns].swapaxes(2, 3)
            plan.fill_hidden(weights, rows, columns, -np.inf)
            weights -= levels
            np.minimum(weights, 0, out=weights)  # a huge lse is coarse: it may lie below the score
            np.exp(weights, out=weights)
            dv[:, :, columns] += weights.swapaxes(2, 3) @ douts
            dscores = douts @ v[:, :, columns].swapaxes(2, 3)
            dscores -= means
            dscores *= weights
            plan.fill_hidden(dscores, rows, columns, 0)
            dqueries += dscores @ k[:, :, columns]
            dk[:, :, columns] += dscores.swapaxes(2, 3) @ queries
        plan.unstack(dq, rows, dqueries * plan.scale)
    return dq, dk, dv


def check_floats(**arrays: np.ndarray) -> None:
    """Raise TypeError for what is not an array of float32 or float64."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
            raise TypeError(f"{name} must be an array of float32 or float64")


def make_plan(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, tile: int) -> Plan:
    """The plan for these inputs, or an error where they do not fit each other."""
    check_floats(q=q, k=k, v=v)
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError("q, k and v must have four axes, k and v the same shape")
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    if (k.shape[0], k.shape[3]) != (batch, width):
        raise ValueError("q and k must agree in batch and width")
    if groups == 0 or heads % groups:
        raise ValueError("the query heads must be a multiple of the key/value heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")
    return Plan(batch, groups, heads // groups, queries, keys, width, bool(causal), int(tile))
