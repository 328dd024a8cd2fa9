"""Exact softmax attention, tile by tile, with the tiles of keys in the outer loop.

Every tile of keys and values is read once and shown to all queries; the running maximum, the running
sum and the unnormalised output of every query wait in float64 for the next tile. Queries that see no
key at all are left out from the start. All others see key 0, which lies in the first tile, so their
maximum is finite from then on and no later step can meet inf - inf.
"""

import operator

import numpy as np


def _check(q, k, v, tile):
    """Raise ValueError or TypeError for arguments outside the contract."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if q.shape[3] == 0 or k.shape[1] == 0:
        raise ValueError("the width and the number of key/value heads must be positive")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


class _RunningSoftmax:
    """Softmax-weighted sums of values that arrive tile by tile, for an array of queries."""

    def __init__(self, shape, width):
        self.peak = np.full(shape, -np.inf)  # largest score so far
        self.mass = np.zeros(shape)  # sum of exp(score - peak)
        self.total = np.zeros((*shape, width))  # sum of exp(score - peak) * value

    def absorb(self, part, scores, values):
        """Add scores (..., queries, keys) and values (..., keys, width) to the queries in `part`."""
        old_peak = self.peak[..., part]
        new_peak = np.maximum(old_peak, scores.max(axis=-1))
        fade = np.exp(old_peak - new_peak)
        scores -= new_peak[..., None]
        weights = np.exp(scores, out=scores)

        self.mass[..., part] *= fade
        self.mass[..., part] += weights.sum(axis=-1)
        self.total[..., part, :] *= fade[..., None]
        self.total[..., part, :] += weights @ values
        self.peak[..., part] = new_peak

    def result(self):
        """Normalised sums and log-sum-exp of the scores."""
        return self.total / self.mass[..., None], self.peak + np.log(self.mass)


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    tile = operator.index(tile)
    _check(q, k, v, tile)
    batch, heads, n_queries, width = q.shape
    groups, n_keys = k.shape[1:3]
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)

    # Query t sees the keys up to t + shift; the first `blind` queries see none.
    shift = n_keys - n_queries if causal else n_keys
    blind = min(n_queries, max(0, -shift)) if n_keys else n_queries
    seeing = n_queries - blind
    if batch == 0 or heads == 0 or seeing == 0:
        return out, lse
    shift += blind

    queries = q[:, :, blind:].astype(np.float64)
    queries *= width**-0.5
    queries = queries.reshape(batch, groups, heads // groups, seeing, width)
    running = _RunningSoftmax(queries.shape[:-1], width)
    with np.errstate(over="ignore", under="ignore"):
        for k0 in range(0, n_keys, tile):
            k1 = min(k0 + tile, n_keys)
            keys = k[:, :, None, k0:k1].astype(np.float64)
            values = v[:, :, None, k0:k1].astype(np.float64)
            for q0 in range(0, seeing, tile):
                q1 = min(q0 + tile, seeing)
                if k0 > q1 - 1 + shift:
                    continue  # even the last query of the tile sees none of these keys
                scores = queries[..., q0:q1, :] @ keys.swapaxes(-1, -2)
                if k1 - 1 > q0 + shift:
                    hidden = np.arange(k0, k1) > np.arange(q0, q1)[:, None] + shift
                    np.copyto(scores, -np.inf, where=hidden)
                running.absorb(slice(q0, q1), scores, values)

        total, log_mass = running.result()
        out[:, :, blind:] = total.reshape(batch, heads, seeing, width)
        lse[:, :, blind:] = log_mass.reshape(batch, heads, seeing)
    return out, lse
