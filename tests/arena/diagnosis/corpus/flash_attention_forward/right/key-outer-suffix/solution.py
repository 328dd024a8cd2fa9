"""Flash attention, forward: keys in the outer loop, and for each block of keys only the queries that see any of it.

The query blocks of one key block start at the first query that sees its first key. So every row of every
score block has at least one visible key, and a running maximum is finite as soon as it is touched.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class _Running:
    """The online softmax of all queries; heads are split into (group, member)."""

    peak: np.ndarray  # (B, G, R, T): largest score so far
    total: np.ndarray  # (B, G, R, T): sum of exp(score - peak)
    blend: np.ndarray  # (B, G, R, T, D): sum of exp(score - peak) * value

    @classmethod
    def fresh(cls, shape: tuple[int, ...], dtype: np.dtype) -> "_Running":
        """The state of queries of this shape before any key."""
        return cls(
            peak=np.full(shape[:-1], -np.inf, dtype),
            total=np.zeros(shape[:-1], dtype),
            blend=np.zeros(shape, dtype),
        )

    def absorb(self, rows: slice, scores: np.ndarray, values: np.ndarray) -> None:
        """Take a block of scores (B,G,R,rows,cols), which is overwritten, and its values (B,G,cols,D)."""
        before = self.peak[..., rows]
        peak = np.maximum(before, scores.max(axis=-1))
        scores -= peak[..., None]
        weights = np.exp(scores, out=scores)
        fade = np.exp(before - peak)
        self.total[..., rows] = self.total[..., rows] * fade + weights.sum(axis=-1)
        blend = self.blend[..., rows, :]
        blend *= fade[..., None]
        blend += _per_group(weights, values)
        self.peak[..., rows] = peak

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """The normalised output and the log-sum-exp; uses the state up."""
        total = np.where(self.total > 0, self.total, 1)
        self.blend /= total[..., None]
        return self.blend, self.peak + np.log(total)


def _per_group(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left (B,G,R,n,a) times right (B,G,a,c): one matrix product for each group."""
    batch, groups, members, count, inner = left.shape
    product = left.reshape(batch, groups, members * count, inner) @ right
    return product.reshape(batch, groups, members, count, right.shape[-1])


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Refuse what the contract calls bad input."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} has {array.ndim} axes instead of 4")
        if not np.issubdtype(array.dtype, np.floating):
            raise TypeError(f"{name} has dtype {array.dtype}, not a real float")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _check(q, k, v, tile)
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    shift = keys - queries  # causal: query t sees the keys up to t + shift

    q = q * max(width, 1) ** -0.5  # a Python float: the dtype stays
    q = q.reshape(batch, groups, heads // groups, queries, width)
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    state = _Running.fresh(q.shape, q.dtype)

    with np.errstate(over="ignore", under="ignore"):  # differences of huge scores may become -inf: weight 0
        for key_start in range(0, keys, tile):
            cols = slice(key_start, min(key_start + tile, keys))
            first = max(0, key_start - shift) if causal else 0
            for query_start in range(first, queries, tile):
                rows = slice(query_start, min(query_start + tile, queries))
                scores = _per_group(q[..., rows, :], k[:, :, cols].swapaxes(-1, -2))
                if causal and cols.stop - 1 > rows.start + shift:
                    limit = np.arange(rows.start, rows.stop)[:, None] + shift
                    hidden = np.arange(cols.start, cols.stop) > limit
                    np.copyto(scores, -np.inf, where=hidden)
                state.absorb(rows, scores, v[:, :, cols])
        out, lse = state.finish()
    return out.reshape(batch, heads, queries, width), lse.reshape(batch, heads, queries)
