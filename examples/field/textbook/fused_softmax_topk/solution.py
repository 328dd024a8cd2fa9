"""Softmax and top-k, row by row, in chunks: maximum, sum, ranking."""

import numpy as np

CHUNK = 4096


def softmax_topk(logits, k):
    """The k largest logits of every row with their softmax probabilities."""
    if logits.ndim != 2:
        raise ValueError("logits must have two dimensions")
    if logits.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError("logits must be float16, float32 or float64")
    N, V = logits.shape
    if k < 1 or k > V:
        raise ValueError("k must be between 1 and V")
    probs = np.zeros((N, k), dtype=logits.dtype)
    indices = np.zeros((N, k), dtype=np.int64)
    for i in range(N):
        row = logits[i]
        m = row_maximum(row)
        total = row_sum(row, m)
        values, indices[i] = row_topk(row, k)
        with np.errstate(over="ignore"):
            probs[i] = np.exp(values - m) / total
    return probs, indices


def chunks(row):
    for start in range(0, len(row), CHUNK):
        yield start, row[start : start + CHUNK].astype(np.float64)


def row_maximum(row):
    m = -np.inf
    for _, chunk in chunks(row):
        if np.isnan(chunk).any():
            raise ValueError("NaN in logits")
        m = max(m, chunk.max())
    if np.isinf(m):
        raise ValueError("a row contains +inf or only -inf")
    return m


def row_sum(row, m):
    with np.errstate(over="ignore"):
        return sum(np.exp(chunk - m).sum() for _, chunk in chunks(row))


def row_topk(row, k):
    """Keep the best k so far; a stable sort keeps lower indices first among equals."""
    values = np.zeros(0)
    indices = np.zeros(0, dtype=np.int64)
    for start, chunk in chunks(row):
        values = np.concatenate([values, chunk])
        indices = np.concatenate([indices, np.arange(start, start + len(chunk))])
        order = np.argsort(-values, kind="stable")[:k]
        values, indices = values[order], indices[order]
    return values, indices
