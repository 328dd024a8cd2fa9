"""Flash attention, forward. The contract is in prompt.md.

The values of a tile get one more column, of ones. The weights times that tile are then the weighted
sum of the values and, in the last column, the sum of the weights: numerator and denominator of the
softmax travel in one accumulator and are rescaled together whenever the running maximum grows.
"""

import numpy as np


def _check(q, k, v, tile):
    """Raise ValueError or TypeError for input that the contract does not admit."""
    for name, values in (("q", q), ("k", k), ("v", v)):
        if not np.issubdtype(values.dtype, np.floating):
            raise TypeError(f"{name} must be a float array, not {values.dtype}")
        if values.ndim != 4:
            raise ValueError(f"{name} must have four axes, not {values.ndim}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} does not fit k {k.shape}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads are not a multiple of {k.shape[1]}")
    if tile < 1:
        raise ValueError("tile must be at least 1")


def _with_ones(values):
    """A tile of values (..., n, D) with a column of ones: (..., n, D + 1)."""
    ones = np.ones(values.shape[:-1] + (1,), dtype=values.dtype)
    return np.concatenate([values, ones], axis=-1)


def _fold(top, sums, scores, values):
    """Fold a tile of scores (..., t, n) and values (..., n, D) into the running state, in place.

    `top` (..., t, 1) is the largest score so far, `sums` (..., t, D + 1) the sums of values and ones,
    weighted with exp(score - top). A row that has seen no key yet has top -inf and sums 0.
    """
    new_top = np.maximum(top, scores.max(axis=-1, keepdims=True))
    shift = np.where(np.isneginf(new_top), 0, new_top)
    sums *= np.exp(top - shift)
    sums += np.exp(scores - shift) @ _with_ones(values)
    top[...] = new_top


def _finish(top, sums):
    """(out, lse) of rows whose keys have all been folded in."""
    total = sums[..., -1:]
    seen = total > 0
    out = np.divide(sums[..., :-1], total, out=np.zeros_like(sums[..., :-1]), where=seen)
    lse = np.full_like(total, -np.inf)
    np.log(total, out=lse, where=seen)
    np.add(lse, top, out=lse, where=seen)
    return out, lse[..., 0]


def _hidden(rows, columns, offset):
    """Which keys (columns) are later than what the queries (rows) may see."""
    return np.arange(columns.start, columns.stop) > np.arange(rows.start, rows.stop)[:, None] + offset


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _check(q, k, v, tile)
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    members = heads // groups
    scale = q.dtype.type(max(width, 1) ** -0.5)
    offset = keys - queries  # query t sees the keys j <= t + offset
    out = np.zeros(q.shape, dtype=q.dtype)
    lse = np.full(q.shape[:-1], -np.inf, dtype=q.dtype)
    for low in range(0, queries, tile):
        rows = slice(low, min(low + tile, queries))
        q_tile = q[:, :, rows] * scale
        q_tile = q_tile.reshape(batch, groups, members, rows.stop - low, width)
        top = np.full(q_tile.shape[:-1] + (1,), -np.inf, dtype=q.dtype)
        sums = np.zeros(q_tile.shape[:-1] + (width + 1,), dtype=q.dtype)
        visible = min(keys, rows.stop + offset) if causal else keys
        for start in range(0, visible, tile):
            columns = slice(start, min(start + tile, visible))
            scores = q_tile @ k[:, :, None, columns].swapaxes(-1, -2)
            if causal and columns.stop - 1 > low + offset:
                np.copyto(scores, -np.inf, where=_hidden(rows, columns, offset))
            with np.errstate(over="ignore", under="ignore"):
                _fold(top, sums, scores, v[:, :, None, columns])
        tile_out, tile_lse = _finish(top, sums)
        out[:, :, rows] = tile_out.reshape(batch, heads, rows.stop - low, width)
        lse[:, :, rows] = tile_lse.reshape(batch, heads, rows.stop - low)
    return out, lse
