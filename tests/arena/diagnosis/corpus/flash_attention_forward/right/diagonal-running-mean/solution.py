"""Exact softmax attention that visits the score matrix one diagonal of tiles at a time.

All tiles of a diagonal have the same distance between their first key and their first query, so one mask serves them
all.  A tile is blended into a weighted mean of the values: `mean` is normalised at every moment, for the keys met so
far, and `mass` is their total weight relative to the largest score `peak`.
"""

import numpy as np


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    check(q, k, v, tile)
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    by_group = (batch, groups, heads // groups, queries)
    grouped_q = q.reshape(*by_group, width)
    grouped_k, grouped_v = k[:, :, None], v[:, :, None]

    peak = np.full((*by_group, 1), -np.inf, dtype=q.dtype)
    mass = np.zeros((*by_group, 1), dtype=q.dtype)
    mean = np.zeros((*by_group, width), dtype=q.dtype)

    scale = width**-0.5
    horizon = keys - queries if causal else keys
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for places, hidden in diagonals(queries, keys, tile, horizon):
            for rows, columns in places:
                scores = (grouped_q[..., rows, :] * scale) @ grouped_k[..., columns, :].swapaxes(-1, -2)
                if hidden is not None:
                    scores[..., hidden[: scores.shape[-2], : scores.shape[-1]]] = -np.inf
                state = tuple(part[..., rows, :] for part in (peak, mass, mean))
                blend(state, scores, grouped_v[..., columns, :])
        lse = peak + np.log(mass)
    return mean.reshape(q.shape), lse.reshape(q.shape[:-1])


def check(q, k, v, tile):
    """Refuse what is no attention problem."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} needs four axes, not {array.ndim}")
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must be of a real floating dtype, not {array.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k and v differ in shape: {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k differ in batch: {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k differ in width: {q.shape[3]} and {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} groups")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def diagonals(queries, keys, tile, horizon):
    """Yield (places, hidden) per diagonal of tiles: an iterator of (rows, columns), and a mask, or None if all is seen.

    Query t sees key j if j - t <= horizon.
    """
    tile = min(tile, max(queries, keys, 1))
    row_tiles, column_tiles = -(-queries // tile), -(-keys // tile)
    distance = np.arange(tile) - np.arange(tile)[:, None]
    for diagonal in range(1 - row_tiles, column_tiles):
        shift = diagonal * tile
        if shift - (tile - 1) > horizon:
            break
        some_hidden = shift + (tile - 1) > horizon
        first_row, end_row = max(0, -diagonal), min(row_tiles, column_tiles - diagonal)
        yield (
            ((stretch(row, tile), stretch(row + diagonal, tile)) for row in range(first_row, end_row)),
            distance + shift > horizon if some_hidden else None,
        )


def stretch(index, tile):
    """The positions of tile number `index` along an axis."""
    return slice(index * tile, (index + 1) * tile)


def blend(state, scores, values):
    """Take the keys of one tile into the running (peak, mass, mean) of its queries, in place."""
    peak, mass, mean = state
    new_peak = np.maximum(peak, scores.max(axis=-1, keepdims=True))
    anchor = np.where(new_peak == -np.inf, 0, new_peak)
    weights = np.exp(scores - anchor)
    kept = mass * np.exp(peak - anchor)
    total = kept + weights.sum(axis=-1, keepdims=True)
    # Whoever has seen a key has a total of at least 1: the weight at the peak.
    divisor = np.maximum(total, 1)
    mean *= kept / divisor
    mean += (weights / divisor) @ values
    peak[...] = new_peak
    mass[...] = total
