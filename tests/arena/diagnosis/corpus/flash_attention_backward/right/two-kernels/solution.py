"""Flash attention, forward and backward; the backward pass is two kernels, one for dk and dv and one for dq."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """The sizes of a problem, and which query sees which key."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    causal: bool
    tile: int

    @property
    def scale(self) -> float:
        return self.width**-0.5

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    @property
    def offset(self) -> int:
        """The last key that query 0 sees in causal attention (negative: query 0 sees none)."""
        return self.keys - self.queries

    def first_query(self, key: int) -> int:
        """The first query that sees a key."""
        return max(0, key - self.offset) if self.causal else 0

    def key_stop(self, query: int) -> int:
        """How many keys a query sees."""
        return min(self.keys, query + self.offset + 1) if self.causal else self.keys

    def tiles(self, start: int, stop: int) -> Iterator[slice]:
        """Cut start..stop into slices of at most `tile`."""
        for begin in range(start, stop, self.tile):
            yield slice(begin, min(begin + self.tile, stop))

    def hidden(self, rows: slice, columns: slice) -> np.ndarray | None:
        """The keys of a tile that its queries do not see, as a mask; None if all are seen."""
        if not self.causal or columns.stop <= rows.start + self.offset + 1:
            return None
        last_seen = np.arange(rows.start, rows.stop) + self.offset
        return np.arange(columns.start, columns.stop) > last_seen[:, None]


def _layout(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, tile: int) -> Layout:
    """Check q, k, v and tile, and return the sizes they describe."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        _check_float(name, array)
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    if k.shape != (batch, groups, keys, width) or v.shape != k.shape:
        raise ValueError(f"shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    if groups == 0 or heads % groups != 0:
        raise ValueError(f"{heads} query heads are not a multiple of {groups} key heads")
    return Layout(batch, heads, groups, queries, keys, width, causal, tile)


def _check_float(name: str, array: np.ndarray) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise TypeError(f"{name} must be an array of real floating-point numbers")


def _check_like(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    _check_float(name, array)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    layout = _layout(q, k, v, causal, tile)
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    if layout.keys == 0:
        return out, lse
    with np.errstate(over="ignore", under="ignore"):
        for b, h in np.ndindex(layout.batch, layout.heads):
            g = h // layout.heads_per_group
            for rows in layout.tiles(layout.first_query(0), layout.queries):
                out[b, h, rows], lse[b, h, rows] = _attend(layout, rows, q[b, h, rows], k[b, g], v[b, g])
    return out, lse


def _attend(
    layout: Layout, rows: slice, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one tile of queries, each of which sees key 0, over the keys of its head."""
    q = q * layout.scale
    peak = np.full((len(q), 1), -np.inf, q.dtype)
    total = np.zeros_like(peak)
    weighted = np.zeros(q.shape, q.dtype)
    for columns in layout.tiles(0, layout.key_stop(rows.stop - 1)):
        scores = q @ k[columns].T
        hidden = layout.hidden(rows, columns)
        if hidden is not None:
            scores[hidden] = -np.inf
        old_peak, peak = peak, np.maximum(peak, scores.max(axis=1, keepdims=True))
        gain = np.exp(old_peak - peak)
        scores -= peak
        weights = np.exp(scores, out=scores)
        total = total * gain + weights.sum(axis=1, keepdims=True)
        weighted = weighted * gain + weights @ v[columns]
    return weighted / total, (peak + np.log(total))[:, 0]


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
    layout = _layout(q, k, v, causal, tile)
    _check_like("dout", dout, q.shape)
    _check_like("out", out, q.shape)
    _check_like("lse", lse, q.shape[:3])

    dq = np.zeros(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)
    delta = np.einsum("bhtd,bhtd->bht", dout, out)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for b, g in np.ndindex(layout.batch, layout.groups):
            group = slice(g * layout.heads_per_group, (g + 1) * layout.heads_per_group)
            saved = (dout[b, group], lse[b, group], delta[b, group])
            _key_kernel(layout, q[b, group], k[b, g], v[b, g], *saved, dk[b, g], dv[b, g])
            _query_kernel(layout, q[b, group], k[b, g], v[b, g], *saved, dq[b, group])
    return dq, dk, dv


def _key_kernel(
    layout: Layout,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    lse: np.ndarray,
    delta: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
) -> None:
    """Fill dk and dv (S,D) of one key head: each tile of keys gathers from all queries of the group that see it."""
    for columns in layout.tiles(0, layout.keys):
        dk_tile = np.zeros(dk[columns].shape, dk.dtype)
        dv_tile = np.zeros(dv[columns].shape, dv.dtype)
        for h in range(layout.heads_per_group):
            for rows in layout.tiles(layout.first_query(columns.start), layout.queries):
                scaled_q = q[h, rows] * layout.scale
                weights = _weights(scaled_q, k[columns], lse[h, rows])
                dscores = _dscores(weights, dout[h, rows], v[columns], delta[h, rows])
                _hide(layout.hidden(rows, columns), weights, dscores)
                dk_tile += dscores.T @ scaled_q
                dv_tile += weights.T @ dout[h, rows]
        dk[columns] = dk_tile
        dv[columns] = dv_tile


def _query_kernel(
    layout: Layout,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    lse: np.ndarray,
    delta: np.ndarray,
    dq: np.ndarray,
) -> None:
    """Fill dq (heads of a group,T,D): each tile of queries gathers from all keys that it sees."""
    for h in range(layout.heads_per_group):
        for rows in layout.tiles(layout.first_query(0), layout.queries):
            dq_tile = np.zeros(dq[h, rows].shape, dq.dtype)
            for columns in layout.tiles(0, layout.key_stop(rows.stop - 1)):
                scaled_k = k[columns] * layout.scale
                weights = _weights(q[h, rows], scaled_k, lse[h, rows])
                dscores = _dscores(weights, dout[h, rows], v[columns], delta[h, rows])
                _hide(layout.hidden(rows, columns), weights, dscores)
                dq_tile += dscores @ scaled_k
            dq[h, rows] = dq_tile


def _weights(q: np.ndarray, k: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """The softmax weights of a tile, from the saved log-sum-exp. A weight is never above 1, however scores round."""
    exponents = q @ k.T
    exponents -= lse[:, None]
    np.minimum(exponents, 0, out=exponents)
    return np.exp(exponents, out=exponents)


def _dscores(weights: np.ndarray, dout: np.ndarray, v: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """The gradient with respect to the scaled scores of a tile."""
    dscores = dout @ v.T
    dscores -= delta[:, None]
    dscores *= weights
    return dscores


def _hide(hidden: np.ndarray | None, *tiles: np.ndarray) -> None:
    """Set what a query does not see to zero."""
    if hidden is not None:
        for values in tiles:
            values[hidden] = 0
