"""Softmax fused with top-k, in two readings of the logits.

The first reading keeps, per row, the k largest *values* and nothing else. Their smallest is the
"floor", their largest the "peak". Which entries the values belong to does not matter yet, so ties
need no care. The second reading knows both: it sums exp(logit - peak) and harvests, in order of the
columns, everything above the floor and as many entries on the floor as there are places left.
"""

import operator

import numpy as np

TILE = 1 << 14  # elements handled at a time (more only where k itself is larger)

# Arithmetic is done one size above the dtype of the logits, where there is one.
_WORK = {np.float16: np.float32, np.float32: np.float64, np.float64: np.float64}


def softmax_topk(logits, k):
    """(probs, indices), both (N, k): the k largest of each row of logits (N, V), best first."""
    logits = np.asarray(logits)
    if logits.ndim != 2:
        raise ValueError(f"logits must have 2 axes, not {logits.ndim}")
    if logits.dtype.type not in _WORK:
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    k = operator.index(k)
    count, vocabulary = logits.shape
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k must be in 1..{vocabulary}, not {k}")

    probs = np.empty((count, k), dtype=logits.dtype)
    indices = np.empty((count, k), dtype=np.int64)
    width = min(vocabulary, max(TILE, k))
    height = max(1, TILE // width)
    # exp(-huge) is 0 and that is the answer: neither overflow nor underflow is an accident here.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for top in range(0, count, height):
            block = slice(top, top + height)
            best = _largest_values(logits[block], k, width)
            probs[block], indices[block] = _harvest(logits[block], best, width)
    return probs, indices


def _tiles(rows, width):
    """Yield (first column, a private copy of that tile in the working dtype)."""
    work = _WORK[rows.dtype.type]
    for start in range(0, rows.shape[1], width):
        yield start, rows[:, start : start + width].astype(work)


def _largest_values(rows, k, width):
    """The k largest values of each row, the smallest of them in column 0, the rest unordered."""
    best = np.full((rows.shape[0], k), -np.inf, dtype=_WORK[rows.dtype.type])
    for _, tile in _tiles(rows, width):
        highest = tile.max(axis=1)
        if not (highest < np.inf).all():  # a NaN fails this, too
            raise ValueError("logits contain NaN or +inf")
        if (highest > best[:, 0]).any():
            pool = np.concatenate((best, tile), axis=1)
            pool.partition(pool.shape[1] - k, axis=1)
            best = pool[:, -k:].copy()
    if (best.max(axis=1) == -np.inf).any():
        raise ValueError("a row of logits is all -inf")
    return best


def _harvest(rows, best, width):
    """Probabilities and columns of the entries that the values in `best` belong to, best first."""
    k = best.shape[1]
    floor = best[:, :1]
    peak = best.max(axis=1, keepdims=True)
    places = k - (best > floor).sum(axis=1, keepdims=True)  # for entries on the floor
    filled = np.zeros_like(places)
    total = np.zeros_like(peak)
    values = np.zeros_like(best)
    columns = np.zeros(best.shape, dtype=np.int64)

    for start, tile in _tiles(rows, width):
        on_floor = tile == floor
        on_floor &= np.cumsum(on_floor, axis=1) <= places
        places -= on_floor.sum(axis=1, keepdims=True)

        taken = (tile > floor) | on_floor
        row, column = np.nonzero(taken)
        slot = (filled + np.cumsum(taken, axis=1) - 1)[row, column]
        values[row, slot] = tile[row, column]
        columns[row, slot] = start + column
        filled += taken.sum(axis=1, keepdims=True)

        tile -= peak
        np.exp(tile, out=tile)
        total += tile.sum(axis=1, keepdims=True)

    # The harvest lies in order of the columns: a stable sort leaves equals that way.
    order = np.argsort(-values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, axis=1)
    columns = np.take_along_axis(columns, order, axis=1)
    probs = (np.exp(values - peak) / total).astype(rows.dtype)
    return probs, columns
