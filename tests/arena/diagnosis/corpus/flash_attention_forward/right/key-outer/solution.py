"""Flash attention, forward: keys in the outer loop, a running state for every query of one head."""

import math

import numpy as np


class RunningSoftmax:
    """Numerator, denominator and maximum of a softmax-weighted sum for `count` queries."""

    def __init__(self, count, width, dtype):
        self.top = np.full(count, -np.inf, dtype)
        self.denominator = np.zeros(count, dtype)
        self.numerator = np.zeros((count, width), dtype)

    def absorb(self, rows, scores, values):
        """Add a block of scores (rows, keys), every row of which sees at least one key."""
        before = self.top[rows]
        after = np.maximum(before, scores.max(axis=1))
        with np.errstate(over="ignore"):
            weights = np.exp(scores - after[:, None])
            decay = np.exp(before - after)
        self.top[rows] = after
        self.denominator[rows] *= decay
        self.denominator[rows] += weights.sum(axis=1)
        self.numerator[rows] *= decay[:, None]
        self.numerator[rows] += weights @ values

    def finish(self, out, lse):
        """Write the normalised sum and the log-sum-exp; rows that saw nothing get 0 and -inf."""
        seen = self.denominator > 0
        out[seen] = self.numerator[seen] / self.denominator[seen, None]
        out[~seen] = 0
        lse[seen] = self.top[seen] + np.log(self.denominator[seen])
        lse[~seen] = -np.inf


def _spans(start, stop, step):
    """The half-open spans of at most `step` that cover [start, stop)."""
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]


def _one_head(q, k, v, out, lse, causal, tile):
    """Attention of one head: q (T,D), k and v (S,D), written to out (T,D) and lse (T)."""
    num_queries, width = q.shape
    num_keys = k.shape[0]
    offset = num_keys - num_queries
    state = RunningSoftmax(num_queries, width, q.dtype)
    factor = 1.0 / math.sqrt(width)
    for lo, hi in _spans(0, num_keys, tile):
        keys = k[lo:hi]
        # The first query that sees key `lo`; those before it see nothing of this block.
        first = max(0, lo - offset) if causal else 0
        for a, b in _spans(first, num_queries, tile):
            scores = (q[a:b] @ keys.T) * factor
            if causal and a + offset < hi - 1:
                limit = np.arange(a, b)[:, None] + offset
                scores = np.where(np.arange(lo, hi)[None, :] <= limit, scores, -np.inf)
                scores = scores.astype(q.dtype, copy=False)
            state.absorb(slice(a, b), scores, v[lo:hi])
    state.finish(out, lse)


def _validate(q, k, v, tile):
    for array in (q, k, v):
        if array.ndim != 4:
            raise ValueError("q, k and v have four axes")
        if not np.issubdtype(array.dtype, np.floating):
            raise TypeError("q, k and v are arrays of real floats")
    batch, heads, _, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if k.shape != (batch, kv_heads, keys, width):
        raise ValueError("k does not fit q")
    if v.shape != k.shape:
        raise ValueError("v does not have the shape of k")
    if kv_heads < 1 or heads % kv_heads != 0:
        raise ValueError("the number of query heads is not a multiple of that of kv heads")
    if tile < 1:
        raise ValueError("tile is at least 1")


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _validate(q, k, v, tile)
    batch, heads, num_queries, _ = q.shape
    group = heads // k.shape[1]
    out = np.empty(q.shape, q.dtype)
    lse = np.empty((batch, heads, num_queries), q.dtype)
    for b in range(batch):
        for h in range(heads):
            g = h // group
            _one_head(q[b, h], k[b, g], v[b, g], out[b, h], lse[b, h], causal, tile)
    return out, lse
