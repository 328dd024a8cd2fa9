"""High-performance fused softmax + top-k with per-tile candidate lists and an online normaliser.

Small vocabularies are sorted directly; large ones go through the tiled path, in which every tile
contributes a bounded candidate list, exactly as a GPU kernel with register-resident heaps would.
"""

import numpy as np

TILE = 1024
CANDIDATES = 48
DIRECT = 4096


def softmax_topk(logits, k):
    """Return (probs, indices) of the k largest logits per row."""
    if logits.ndim != 2:
        raise ValueError(f"expected (N, V), got {logits.shape}")
    if logits.dtype.kind != "f":
        raise TypeError(f"expected floating point logits, got {logits.dtype}")
    n, v = logits.shape
    if not 1 <= k <= v:
        raise ValueError(f"k must be in [1, {v}]")
    probs = np.empty((n, k), logits.dtype)
    indices = np.empty((n, k), np.int64)
    for i in range(n):
        row = np.ascontiguousarray(logits[i])
        peak, total = _normaliser(row)
        where = _direct(row, k) if v <= DIRECT else _tiled(row, k)
        indices[i] = where
        chosen = row[where].astype(np.float64)
        probs[i] = np.exp(chosen - peak) / total
        # Scrub the scratch row so that no candidate is considered twice.
        row[where[0]] = -np.inf
    return probs, indices


def _normaliser(row):
    """Online softmax: running maximum and rescaled sum."""
    peak, total = -np.inf, 0.0
    for start in range(0, row.size, TILE):
        tile = row[start : start + TILE].astype(np.float64)
        top = tile.max()
        if not top < np.inf:
            raise ValueError("logits contain NaN or +inf")
        new = max(peak, top)
        if new > -np.inf:
            with np.errstate(over="ignore"):
                total = total * np.exp(peak - new) + np.exp(tile - new).sum()
            peak = new
    if peak == -np.inf:
        raise ValueError("a row has no finite logit")
    return peak, total


def _direct(row, k):
    return np.argsort(-row.astype(np.float64), kind="stable")[:k]


def _tiled(row, k):
    lists = []
    for start in range(0, row.size, TILE):
        tile = row[start : start + TILE].astype(np.float64)
        lists.append(start + np.argsort(-tile, kind="stable")[:CANDIDATES])
    pool = np.concatenate(lists)
    order = np.lexsort((pool, -row[pool].astype(np.float64)))
    return pool[order[:k]]
