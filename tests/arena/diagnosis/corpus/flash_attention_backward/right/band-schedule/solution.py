"""Flash attention, forward and backward, driven by one schedule of bands and blocks.

A band is a run of queries, a block is a run of keys that a band looks at.  `_bands` alone knows about
`causal`, `tile` and queries without keys; both passes follow it for every key/value head, with the
query heads of its group stacked on top of each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sizes:
    """The axes of a checked problem."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int

    @property
    def scale(self) -> float:
        """What scores are multiplied by; a Python float, which leaves float32 arrays float32."""
        return float(self.width) ** -0.5


@dataclass(frozen=True)
class Block:
    """A run of keys, and which of them are hidden from which query of the band (None: nothing)."""

    cols: slice
    hidden: np.ndarray | None


def _check_arrays(arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must be of a float dtype, not {array.dtype}")
        axes = 3 if name == "lse" else 4
        if array.ndim != axes:
            raise ValueError(f"{name} must have {axes} axes, not {array.ndim}")


def _measure(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> Sizes:
    """Check the inputs that both passes share."""
    _check_arrays({"q": q, "k": k, "v": v})
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    batch, heads, queries, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(f"q {q.shape} does not fit k {k.shape}")
    groups, keys = k.shape[1:3]
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key/value heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    return Sizes(batch, heads, groups, queries, keys, width)


def _groups(sizes: Sizes) -> Iterator[tuple[int, int, slice]]:
    """Every key/value head (batch, group) with the query heads that read it."""
    share = sizes.heads // sizes.groups
    for batch, group in np.ndindex(sizes.batch, sizes.groups):
        yield batch, group, slice(group * share, (group + 1) * share)


def _bands(sizes: Sizes, causal: bool, tile: int) -> Iterator[tuple[slice, Iterator[Block]]]:
    """Bands of queries that see at least one key, each with its blocks, the first key first."""
    shift = sizes.keys - sizes.queries
    if sizes.keys == 0:
        return
    first = max(0, -shift) if causal else 0
    for start in range(first, sizes.queries, tile):
        rows = slice(start, min(start + tile, sizes.queries))
        yield rows, _blocks(rows, sizes.keys, shift if causal else None, tile)


def _blocks(rows: slice, keys: int, shift: int | None, tile: int) -> Iterator[Block]:
    """The blocks of keys that a band sees; `shift` is None where nothing is hidden."""
    for start in range(0, keys, tile):
        cols = slice(start, min(start + tile, keys))
        if shift is None:
            yield Block(cols, None)
            continue
        if start > rows.stop - 1 + shift:
            return
        if cols.stop - 1 <= rows.start + shift:
            yield Block(cols, None)
            continue
        last_seen = np.arange(rows.start, rows.stop) + shift
        yield Block(cols, np.arange(cols.start, cols.stop) > last_seen[:, None])


def _stack(part: np.ndarray) -> np.ndarray:
    """(heads of a group, queries of a band, D) as one matrix of rows."""
    return part.reshape(-1, part.shape[-1])


def _scores(stacked: np.ndarray, keys: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
    """Scores of scaled, stacked queries; -inf where a key is hidden."""
    scores = stacked @ keys.T
    if hidden is not None:
        per_head = scores.reshape(-1, *hidden.shape)
        np.copyto(per_head, -np.inf, where=hidden)
    return scores


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    sizes = _measure(q, k, v, tile)
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    for batch, group, heads in _groups(sizes):
        for rows, blocks in _bands(sizes, causal, tile):
            band = q[batch, heads, rows]
            stacked = _stack(band) * sizes.scale
            peak = np.full((len(stacked), 1), -np.inf, q.dtype)
            mass = np.zeros_like(peak)
            mixed = np.zeros(stacked.shape, q.dtype)
            for block in blocks:
                weights = _scores(stacked, k[batch, group, block.cols], block.hidden)
                # The first block holds key 0, which every query of a band sees: finite from then on.
                higher = np.maximum(peak, weights.max(axis=1, keepdims=True))
                fade = np.exp(peak - higher)
                weights -= higher
                np.exp(weights, out=weights)
                mass = mass * fade + weights.sum(axis=1, keepdims=True)
                mixed = mixed * fade + weights @ v[batch, group, block.cols]
                peak = higher
            out[batch, heads, rows] = (mixed / mass).reshape(band.shape)
            lse[batch, heads, rows] = (peak + np.log(mass)).reshape(band.shape[:2])
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
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    dout, out, lse = np.asarray(dout), np.asarray(out), np.asarray(lse)
    sizes = _measure(q, k, v, tile)
    _check_arrays({"dout": dout, "out": out, "lse": lse})
    if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError("dout, out and lse do not fit q")
    dq = np.zeros(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)
    for batch, group, heads in _groups(sizes):
        for rows, blocks in _bands(sizes, causal, tile):
            band = q[batch, heads, rows]
            stacked = _stack(band) * sizes.scale
            upstream = _stack(dout[batch, heads, rows])
            level = lse[batch, heads, rows].reshape(-1, 1)
            pull = np.sum(upstream * _stack(out[batch, heads, rows]), axis=1, keepdims=True)
            slope = np.zeros(stacked.shape, q.dtype)
            for block in blocks:
                keys, values = k[batch, group, block.cols], v[batch, group, block.cols]
                weights = _scores(stacked, keys, block.hidden)
                weights -= level
                # No weight exceeds 1, however far the saved lse is from these scores.
                np.minimum(weights, 0, out=weights)
                np.exp(weights, out=weights)
                dv[batch, group, block.cols] += weights.T @ upstream
                dscores = upstream @ values.T
                dscores -= pull
                dscores *= weights
                slope += dscores @ keys
                dk[batch, group, block.cols] += dscores.T @ stacked
            dq[batch, heads, rows] = (slope * sizes.scale).reshape(band.shape)
    return dq, dk, dv
