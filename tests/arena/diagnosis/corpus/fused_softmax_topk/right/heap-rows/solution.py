"""Softmax fused with top-k: every row is read in chunks by a generator, winners live in a heap."""

import heapq
import math

import numpy as np

CHUNK = 1024


def chunks(row):
    """(start, float64 copy) of successive pieces of a row."""
    for start in range(0, row.shape[0], CHUNK):
        yield start, row[start : start + CHUNK].astype(np.float64)


def check(logits, k):
    if not isinstance(logits, np.ndarray):
        raise TypeError("logits must be a NumPy array")
    if logits.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"logits cannot be {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError("logits must have two axes")
    if k < 1 or k > logits.shape[1]:
        raise ValueError(f"k must lie between 1 and {logits.shape[1]}")


def select(row, k):
    """[(logit, -index)], best first. The heap's root is the worst entry that is still in."""
    heap = []
    for start, values in chunks(row):
        if np.isnan(values).any() or np.isposinf(values).any():
            raise ValueError("a row contains NaN or +inf")
        room = min(k - len(heap), len(values))
        for place in range(room):
            heapq.heappush(heap, (float(values[place]), -(start + place)))
        for place in (room + np.flatnonzero(values[room:] > heap[0][0])).tolist():
            entry = (float(values[place]), -(start + place))
            if entry > heap[0]:
                heapq.heapreplace(heap, entry)
    heap.sort(reverse=True)
    return heap


def total(row, largest):
    """Sum of exp(logit - largest)."""
    parts = []
    for _, values in chunks(row):
        values -= largest
        np.exp(values, out=values)
        parts.append(float(values.sum()))
        if len(parts) == 64:
            parts = [math.fsum(parts)]
    return math.fsum(parts)


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    check(logits, k)
    k = int(k)
    rows = logits.shape[0]
    probs = np.empty((rows, k), dtype=logits.dtype)
    indices = np.empty((rows, k), dtype=np.int64)
    with np.errstate(over="ignore", under="ignore"):
        for n in range(rows):
            best = select(logits[n], k)
            largest = best[0][0]
            if largest == -math.inf:
                raise ValueError("a row is all -inf")
            weight = total(logits[n], largest)
            probs[n] = [math.exp(value - largest) / weight for value, _ in best]
            indices[n] = [-negated for _, negated in best]
    return probs, indices
