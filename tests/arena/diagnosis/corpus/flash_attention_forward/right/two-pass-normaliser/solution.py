"""Flash attention, forward, in two sweeps over the keys.

The first sweep finds for every query the largest score (the peak) and the sum of the exponentials relative to it.
The second sweep computes the score tiles again and, the normaliser being known, adds finished weights times values.
Neither sweep holds more than one tile of scores for each head.
"""

import math
import operator
from collections.abc import Iterator

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    tile = operator.index(tile)
    _refuse_bad_input(q, k, v, tile)

    queries, keys = q.shape[2], k.shape[2]
    out = np.zeros(q.shape, dtype=q.dtype)
    lse = np.full(q.shape[:3], -np.inf, dtype=q.dtype)
    if keys == 0:
        return out, lse

    # A difference of two huge scores may overflow to -inf, whose exponential, 0, is the right weight.
    with np.errstate(over="ignore", under="ignore"):
        first_seeing = max(0, queries - keys) if causal else 0
        for start in range(first_seeing, queries, tile):
            rows = slice(start, min(start + tile, queries))
            sweep = _KeySweep(q, k, rows, causal, tile)
            peak, total = _normaliser(sweep)
            lse[:, :, rows] = (peak + np.log(total))[..., 0]
            for columns, scores in sweep.tiles():
                weights = np.exp(scores - peak) / total
                out[:, :, rows] += weights @ sweep.for_query_heads(v, columns)
    return out, lse


def _normaliser(sweep: "_KeySweep") -> tuple[np.ndarray, np.ndarray]:
    """The largest score of each query and the sum of exp(score - largest), both (B,H,rows,1).

    Every query of the sweep sees key 0, so that the peak is finite after the first tile.
    """
    peak = np.full(sweep.column_shape, -np.inf, dtype=sweep.dtype)
    total = np.zeros(sweep.column_shape, dtype=sweep.dtype)
    for _, scores in sweep.tiles():
        higher = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        total *= np.exp(peak - higher)
        total += np.exp(scores - higher).sum(axis=-1, keepdims=True)
        peak = higher
    return peak, total


class _KeySweep:
    """The scaled scores of one tile of queries against all the keys they see, one tile of keys after the other."""

    def __init__(self, q: np.ndarray, k: np.ndarray, rows: slice, causal: bool, tile: int) -> None:
        heads, queries, width = q.shape[1:]
        groups, keys = k.shape[1:3]
        self.k = k
        self.tile = tile
        self.causal = causal
        self.kv_head = np.arange(heads) // (heads // groups)
        self.scaled_q = q[:, :, rows] * (1.0 / math.sqrt(width))
        self.dtype = q.dtype
        self.column_shape = (*self.scaled_q.shape[:3], 1)
        # seen[i] is how many keys the i-th query of the tile sees: keys 0 .. seen[i] - 1.
        if causal:
            self.seen = np.arange(rows.start, rows.stop) + (keys - queries + 1)
        else:
            self.seen = np.full(rows.stop - rows.start, keys)

    def for_query_heads(self, x: np.ndarray, columns: slice) -> np.ndarray:
        """Some rows of k or v, one copy for each query head: (B,H,columns,D)."""
        return x[:, :, columns][:, self.kv_head]

    def tiles(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields (which keys, their scores (B,H,rows,columns) with -inf at hidden keys)."""
        end = int(self.seen[-1])
        for start in range(0, end, self.tile):
            columns = slice(start, min(start + self.tile, end))
            scores = self.scaled_q @ self.for_query_heads(self.k, columns).swapaxes(-1, -2)
            if columns.stop > self.seen[0]:
                hidden = np.arange(columns.start, columns.stop) >= self.seen[:, None]
                scores[..., hidden] = -np.inf
            yield columns, scores


def _refuse_bad_input(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Raises ValueError or TypeError for anything outside the contract."""
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
        if array.dtype not in FLOATS:
            raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
        if array.dtype != q.dtype:
            raise TypeError(f"{name} is {array.dtype}, but q is {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} must have one shape")
    batch, heads, _, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if width == 0 or heads == 0 or k.shape[1] == 0:
        raise ValueError("width and numbers of heads must be at least 1")
    if heads % k.shape[1]:
        raise ValueError(f"{heads} query heads are no multiple of {k.shape[1]} key/value heads")
