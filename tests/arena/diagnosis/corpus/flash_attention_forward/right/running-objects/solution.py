# ruff: noqa: E501
"""Flash attention with objects: a Mask, a RunningSoftmax per query tile, and a Head that drives them."""

from dataclasses import dataclass

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: all, or those up to query + offset."""

    causal: bool
    offset: int

    def end(self, last_query, num_keys):
        """One past the last key that any query up to last_query sees."""
        if not self.causal:
            return num_keys
        return min(num_keys, max(0, last_query + self.offset + 1))

    def hide(self, scores, first_query, first_key):
        """Set hidden scores to -inf, in place."""
        if not self.causal:
            return
        for row in range(scores.shape[0]):
            first_hidden = first_query + row + self.offset + 1 - first_key
            if first_hidden < scores.shape[1]:
                scores[row, max(0, first_hidden) :] = -np.inf


class RunningSoftmax:
    """A softmax average of values whose scores arrive in pieces; `mean` is always normalised."""

    def __init__(self, rows, width, dtype):
        self.peak = np.full(rows, -np.inf, dtype)
        self.norm = np.zeros(rows, dtype)
        self.mean = np.zeros((rows, width), dtype)

    def update(self, scores, values):
        peak = np.maximum(self.peak, scores.max(axis=-1))
        live = peak > -np.inf
        if not live.any():
            return
        anchor = np.where(live, peak, np.zeros_like(peak))
        fade = np.exp(self.peak - anchor)
        weights = np.exp(scores - anchor[:, np.newaxis])
        kept = self.norm * fade
        norm = kept + weights.sum(axis=-1)
        divisor = np.where(live, norm, np.ones_like(norm))
        weights /= divisor[:, np.newaxis]
        self.mean *= (kept / divisor)[:, np.newaxis]
        self.mean += weights @ values
        self.peak, self.norm = peak, norm

    @property
    def lse(self):
        answer = np.full_like(self.norm, -np.inf)
        seen = self.norm > 0
        answer[seen] = np.log(self.norm[seen]) + self.peak[seen]
        return answer


class Head:
    """One query head and the key/value head that it reads."""

    def __init__(self, queries, keys, values, mask, tile):
        self.queries, self.keys, self.values = queries, keys, values
        self.mask, self.tile = mask, tile

    def tiles(self, stop):
        start = 0
        while start < stop:
            yield slice(start, min(start + self.tile, stop))
            start += self.tile

    def run(self, out, lse):
        length, width = self.queries.shape
        for rows in self.tiles(length):
            block = self.queries[rows] / np.sqrt(width, dtype=self.queries.dtype)
            state = RunningSoftmax(len(block), width, block.dtype)
            for cols in self.tiles(self.mask.end(rows.stop - 1, len(self.keys))):
                scores = np.matmul(block, self.keys[cols].transpose())
                self.mask.hide(scores, rows.start, cols.start)
                state.update(scores, self.values[cols])
            out[rows] = state.mean
            lse[rows] = state.lse


class Request:
    """Validated arguments of one call."""

    def __init__(self, q, k, v, tile):
        for x in (q, k, v):
            if x.dtype not in FLOATS or x.dtype != q.dtype:
                raise TypeError("float32 or float64 arrays of one dtype are needed")
            if x.ndim != 4:
                raise ValueError("arrays need 4 axes")
        if k.shape != v.shape:
            raise ValueError("k and v must have one shape")
        if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
            raise ValueError("k does not fit q")
        if k.shape[1] < 1 or q.shape[1] % k.shape[1] != 0:
            raise ValueError("number of query heads is not a multiple of that of kv heads")
        if tile < 1:
            raise ValueError("tile must be >= 1")
        self.q, self.k, self.v, self.tile = q, k, v, tile

    def heads(self, mask):
        per_group = self.q.shape[1] // self.k.shape[1]
        for b in range(self.q.shape[0]):
            for h in range(self.q.shape[1]):
                g = h // per_group
                yield (b, h), Head(self.q[b, h], self.k[b, g], self.v[b, g], mask, self.tile)


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    request = Request(q, k, v, tile)
    mask = Mask(bool(causal), k.shape[2] - q.shape[2])
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:3], q.dtype)
    with np.errstate(over="ignore", under="ignore"):
        for where, head in request.heads(mask):
            head.run(out[where], lse[where])
    return out, lse
