"""Flash attention, forward: every tile is worked out in a few scratch arrays that a call allocates once."""

import numpy as np


class Scratch:
    """The work arrays of one query tile. Every array is overwritten tile by tile and dropped at the end of the call."""

    def __init__(self, rows: int, columns: int, width: int, dtype: np.dtype) -> None:
        self.queries = np.empty((rows, width), dtype)
        self.update = np.empty((rows, width), dtype)
        self.weighted = np.empty((rows, width), dtype)
        self.scores = np.empty(rows * columns, dtype)
        self.peak = np.empty((rows, 1), dtype)
        self.total = np.empty((rows, 1), dtype)

    def start(self, queries: np.ndarray, scale: float) -> None:
        """Load the queries of a tile, scaled, and forget what was accumulated for the tile before."""
        rows = len(queries)
        np.multiply(queries, scale, out=self.queries[:rows])
        self.weighted[:rows] = 0
        self.total[:rows] = 0
        self.peak[:rows] = -np.inf

    def absorb(self, rows: int, keys: np.ndarray, values: np.ndarray, hidden: np.ndarray | None) -> None:
        """Add one tile of keys and values to the running sums of the first `rows` queries."""
        scores = self.scores[: rows * len(keys)].reshape(rows, len(keys))
        peak, total, weighted, update = (part[:rows] for part in (self.peak, self.total, self.weighted, self.update))

        np.matmul(self.queries[:rows], keys.T, out=scores)
        if hidden is not None:
            scores[hidden] = -np.inf

        new_peak = np.maximum(peak, scores.max(axis=1, keepdims=True))
        anchor = np.where(np.isneginf(new_peak), 0, new_peak)
        gain = np.exp(peak - anchor)
        np.subtract(scores, anchor, out=scores)
        np.exp(scores, out=scores)

        total *= gain
        total += scores.sum(axis=1, keepdims=True)
        weighted *= gain
        weighted += np.matmul(scores, values, out=update)
        peak[:] = new_peak

    def finish(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Write the attention and the log-sum-exp of the tile; a row without any key keeps 0 and -inf."""
        rows = len(out)
        total = self.total[:rows]
        total[total == 0] = 1
        np.divide(self.weighted[:rows], total, out=out)
        np.add(self.peak[:rows, 0], np.log(total[:, 0]), out=lse)


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Refuse arrays that are no attention problem."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise TypeError(f"{name} must be an array of real floating-point numbers")
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def _hidden(queries: range, keys: range, offset: int) -> np.ndarray | None:
    """Which keys of a tile lie behind a query's last visible key, query + offset; None if none does."""
    if keys[-1] <= queries[0] + offset:
        return None
    return np.arange(keys.start, keys.stop) > np.arange(queries.start, queries.stop)[:, None] + offset


def _tiles(stop: int, tile: int) -> list[range]:
    """Cut range(stop) into ranges of at most `tile`."""
    return [range(start, min(start + tile, stop)) for start in range(0, stop, tile)]


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    _check(q, k, v, tile)
    batch, heads, query_count, width = q.shape
    groups, key_count = k.shape[1:3]
    heads_per_group = heads // groups
    offset = key_count - query_count
    scale = width**-0.5

    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    flat_out = out.reshape(batch * heads, query_count, width)
    flat_lse = lse.reshape(batch * heads, query_count)
    flat_q = q.reshape(batch * heads, query_count, width)
    flat_k = k.reshape(batch * groups, key_count, width)
    flat_v = v.reshape(batch * groups, key_count, width)

    scratch = Scratch(min(tile, query_count), min(tile, key_count), width, q.dtype)
    with np.errstate(over="ignore", under="ignore"):
        for head in range(batch * heads):
            keys_of_head = flat_k[head // heads_per_group]
            values_of_head = flat_v[head // heads_per_group]
            for queries in _tiles(query_count, tile):
                rows = slice(queries.start, queries.stop)
                scratch.start(flat_q[head, rows], scale)
                visible = min(key_count, queries.stop + offset) if causal else key_count
                for keys in _tiles(visible, tile):
                    columns = slice(keys.start, keys.stop)
                    hidden = _hidden(queries, keys, offset) if causal else None
                    scratch.absorb(len(queries), keys_of_head[columns], values_of_head[columns], hidden)
                scratch.finish(flat_out[head, rows], flat_lse[head, rows])
    return out, lse
