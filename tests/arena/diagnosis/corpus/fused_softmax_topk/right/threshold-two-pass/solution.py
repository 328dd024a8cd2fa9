"""Softmax fused with top-k: the first pass keeps values only, the second finds where they stand.

Pass one keeps the k largest logits of each row without their positions, and the running sum.
Their minimum is the threshold. Pass two takes everything above it, and the first of those at it.
"""

import numpy as np

BUDGET = 24576
SLAB = 3072
SUPPORTED = frozenset(np.dtype(t) for t in ("f2", "f4", "f8"))


def slabs(block):
    left = 0
    while left < block.shape[1]:
        right = min(left + SLAB, block.shape[1])
        yield left, block[:, left:right].astype(np.float64)
        left = right


def first_pass(block, k):
    """(k largest values unordered, largest value, sum of exp relative to it), per row."""
    top = np.empty((len(block), 0))
    largest = np.full((len(block), 1), -np.inf)
    total = np.zeros((len(block), 1))
    for _, slab in slabs(block):
        bad = ~(slab < np.inf)
        if bad.any():
            raise ValueError(f"row {np.argmax(bad.any(axis=1))} of a block has NaN or +inf")
        new = np.maximum(largest, slab.max(axis=1, keepdims=True))
        anchor = np.where(new > -np.inf, new, 0.0)
        total = total * np.exp(largest - anchor)
        total += np.sum(np.exp(slab - anchor), axis=1, keepdims=True)
        largest = new
        top = np.hstack((top, slab))
        if top.shape[1] > k:
            cut = top.shape[1] - k
            top = np.partition(top, cut, axis=1)[:, cut:]
    if np.isneginf(largest).any():
        raise ValueError("a row is all -inf")
    return top, largest, total


def second_pass(block, top, k):
    """(values, columns), best first, per row."""
    threshold = top.min(axis=1, keepdims=True)
    open_ties = k - np.sum(top > threshold, axis=1, keepdims=True)
    values = np.empty(top.shape)
    columns = np.empty(top.shape, dtype=np.int64)
    filled = np.zeros(len(block), dtype=np.int64)
    for left, slab in slabs(block):
        tied = slab == threshold
        number = np.cumsum(tied, axis=1)
        take = (slab > threshold) | (tied & (number <= open_ties))
        open_ties = np.maximum(open_ties - number[:, -1:], 0)
        slot = np.cumsum(take, axis=1) - 1 + filled[:, None]
        row, column = np.nonzero(take)
        values[row, slot[row, column]] = slab[row, column]
        columns[row, slot[row, column]] = column + left
        filled += take.sum(axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(columns, order, axis=1)


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    if not isinstance(logits, np.ndarray) or logits.dtype not in SUPPORTED:
        raise TypeError("logits must be a floating-point array")
    if logits.ndim != 2:
        raise ValueError("logits must be (N, V)")
    n, v = logits.shape
    if k < 1 or k > v:
        raise ValueError("k must be between 1 and V")
    probs = np.empty((n, k), dtype=logits.dtype)
    indices = np.empty((n, k), dtype=np.int64)
    height = max(1, BUDGET // (k + min(v, SLAB)))
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, n, height):
            block = logits[start : start + height]
            top, largest, total = first_pass(block, k)
            values, columns = second_pass(block, top, k)
            probs[start : start + height] = np.exp(values - largest) / total
            indices[start : start + height] = columns
    return probs, indices
