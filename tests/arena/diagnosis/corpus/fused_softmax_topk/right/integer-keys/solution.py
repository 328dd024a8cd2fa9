"""Softmax fused with top-k: logits become ordered integers, a fold over tiles sorts (key, index)."""  # noqa: E501

from functools import reduce

import numpy as np

WIDTH = 4096
AREA = 32768
SIGN = np.uint64(1 << 63)


def descending_key(values):
    """uint64 that grows as the float64 falls; equal floats (also -0 and +0) have equal keys."""
    bits = (values + 0.0).view(np.uint64)  # -0.0 + 0.0 is +0.0
    ascending = np.where(bits & SIGN, ~bits, bits | SIGN)
    return ~ascending


def value_of_key(keys):
    ascending = ~keys
    bits = np.where(ascending & SIGN, ascending ^ SIGN, ~ascending)
    return bits.view(np.float64)


def tiles(block):
    columns = block.shape[1]
    for left in range(0, columns, WIDTH):
        yield left, block[:, left : min(left + WIDTH, columns)]


def read(tile):
    values = tile.astype(np.float64, order="C")
    if np.any(np.isnan(values)) or np.any(values == np.inf):
        raise ValueError("NaN or +inf among the logits")
    return values


def smallest(keys, places, k):
    """The k smallest (key, place) of each row, in order."""
    order = np.lexsort((places, keys), axis=1)[:, :k]
    return np.take_along_axis(keys, order, axis=1), np.take_along_axis(places, order, axis=1)


def candidates(values, left, k):
    places = np.broadcast_to(np.arange(left, left + values.shape[1], dtype=np.int64), values.shape)
    return smallest(descending_key(values), places, k)


def fold_best(state, item, k):
    left, tile = item
    keys, places = candidates(read(tile), left, k)
    if state is None:
        return keys, places
    return smallest(np.hstack([state[0], keys]), np.hstack([state[1], places]), k)


def fold_sum(total, item, top):
    values = item[1].astype(np.float64)
    return total + np.exp(values - top).sum(axis=1, keepdims=True)


def solve(block, k):
    keys, places = reduce(lambda s, t: fold_best(s, t, k), tiles(block), None)
    values = value_of_key(keys)
    top = values[:, :1]
    if np.any(np.isneginf(top)):
        raise ValueError("a row without a finite logit")
    total = reduce(lambda s, t: fold_sum(s, t, top), tiles(block), np.zeros((len(block), 1)))
    return np.exp(values - top) / total, places


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    if not isinstance(logits, np.ndarray):
        raise TypeError("logits is not an array")
    if logits.dtype.kind != "f" or logits.dtype.itemsize > 8:
        raise TypeError("logits must be float16, float32 or float64")
    if logits.ndim != 2:
        raise ValueError("logits must be a matrix")
    count, columns = logits.shape
    if k < 1:
        raise ValueError("k must be positive")
    if k > columns:
        raise ValueError("k exceeds the number of columns")
    probs = np.zeros((count, k), dtype=logits.dtype)
    indices = np.zeros((count, k), dtype=np.int64)
    step = max(1, AREA // (min(WIDTH, columns) + 2 * k))
    with np.errstate(over="ignore", under="ignore"):
        for first in range(0, count, step):
            rows = slice(first, first + step)
            probs[rows], indices[rows] = solve(logits[rows], k)
    return probs, indices
