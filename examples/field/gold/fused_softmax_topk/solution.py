"""Softmax fused with top-k: one pass over each row in tiles, an online sum and a running best.

N rows, V logits each. Extra memory: the answer, and one tile. Why it is exact: ANALYSIS.md.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Indices = NDArray[np.int64]

#: Logits looked at together: large enough that NumPy's overhead vanishes, small enough for a cache.
TILE = 8192


def softmax_topk(logits: Floats, k: int) -> tuple[Floats, Indices]:
    """(probs, indices), both (N, k): the k largest logits of each row, ties to the lower index."""
    _check(logits, k)
    rows = logits.shape[0]
    probs = np.empty((rows, k), logits.dtype)
    indices = np.empty((rows, k), np.int64)
    for row in range(rows):
        probs[row], indices[row] = _one_row(logits[row], k)
    return probs, indices


def _check(logits: Floats, k: int) -> None:
    """Refuses what the contract refuses before a single logit is read."""
    if logits.ndim != 2:
        raise ValueError(f"logits must have axes (N, V), got shape {logits.shape}")
    if logits.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"logits must be float16, float32 or float64, got {logits.dtype}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be between 1 and {logits.shape[1]}, got {k}")


def _one_row(logits: Floats, k: int) -> tuple[Floats, Indices]:
    """Probabilities and indices of the k best of one row (V,)."""
    best, places = np.empty(0), np.empty(0, np.int64)  # descending, equals in index order
    largest, total = -np.inf, 0.0  # m and Σ exp(x − m) of what was seen
    for start in range(0, logits.size, TILE):
        # float64 holds every float16 and float32 exactly, so ranking wide is ranking exactly.
        tile = logits[start : start + TILE].astype(np.float64)
        largest, total = _accumulate(largest, total, tile)
        best, places = _merge(best, places, tile, start, k)
    if largest == -np.inf:
        raise ValueError("a row of logits is all -inf")
    return _weights(best, largest) / total, places


def _accumulate(largest: float, total: float, tile: Floats) -> tuple[float, float]:
    """The online softmax: a maximum that rises shrinks the earlier sum by exp(old − new)."""
    tile_max = np.max(tile)
    if not tile_max < np.inf:  # NaN fails every comparison
        raise ValueError("a row of logits contains NaN or +inf")
    new = max(largest, tile_max)
    if new == -np.inf:  # nothing finite yet, and -inf - -inf would be NaN
        return largest, total
    return new, total * _weights(largest, new) + np.sum(_weights(tile, new))


def _weights(values: Floats, largest: float) -> Floats:
    """exp(values − largest)."""
    with np.errstate(over="ignore"):  # a difference beyond the range is -inf, and its exp is 0
        return np.exp(values - largest)


def _merge(
    best: Floats, places: Indices, tile: Floats, start: int, k: int
) -> tuple[Floats, Indices]:
    """The k best of what was kept and a tile."""
    # Only what beats the k-th best so far can enter: an equal one comes later and loses the tie.
    fresh = np.flatnonzero(tile > best[-1]) if best.size == k else np.arange(tile.size)
    values = np.concatenate((best, tile[fresh]))
    places = np.concatenate((places, start + fresh))
    if values.size > k:
        cut = np.partition(values, values.size - k)[values.size - k]
        kept = values >= cut
        values, places = values[kept], places[kept]
    order = np.argsort(-values, kind="stable")[:k]
    return values[order], places[order]
