"""Softmax fused with top-k: summaries of tiles, folded from left to right.

A tile of a block of rows is boiled down to a `Summary`: the peak of every row, the sum of the
exponentials below that peak, and the k largest entries. Two summaries of neighbouring tiles combine
into the summary of both, so a row block is one `functools.reduce` over its tiles.

The entries of a summary stand in the order of their indices. That makes ties easy: wherever a choice
falls between equals, the leftmost is the right one, and one stable sort at the very end ranks the rest.
"""

from functools import reduce
from typing import NamedTuple

import numpy as np

TILE_ELEMENTS = 1 << 14
FLOAT_TYPES = (np.float16, np.float32, np.float64)


class Summary(NamedTuple):
    """What is known of a block of rows after some of its columns."""

    peak: np.ndarray  # (rows,) largest logit
    total: np.ndarray  # (rows,) sum of exp(logit - anchor(peak))
    logits: np.ndarray  # (rows, at most k) largest logits, by index
    indices: np.ndarray  # (rows, at most k) where they stand


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits = np.asarray(logits)
    if logits.dtype.type not in FLOAT_TYPES:
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have rank 2, not {logits.ndim}")
    num_rows, vocabulary = logits.shape
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k must lie in [1, {vocabulary}], not {k}")

    probs = np.empty((num_rows, k), dtype=logits.dtype)
    indices = np.empty((num_rows, k), dtype=np.int64)
    block_rows = max(1, TILE_ELEMENTS // vocabulary)
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, num_rows, block_rows):
            block = slice(start, start + block_rows)
            probs[block], indices[block] = rank(summarise_rows(logits[block], k))
    return probs, indices


def summarise_rows(rows, k):
    """The summary of whole rows, one tile of columns at a time."""
    summaries = (
        summarise_tile(rows[:, start : start + TILE_ELEMENTS], start, k)
        for start in range(0, rows.shape[1], TILE_ELEMENTS)
    )
    summary = reduce(lambda left, right: combine(left, right, k), summaries)
    if np.isneginf(summary.peak).any():
        raise ValueError("a row of logits is -inf throughout")
    return summary


def summarise_tile(tile, first_column, k):
    """The summary of one tile, whose columns start at first_column of the row."""
    tile = tile.astype(np.float64)
    peak = tile.max(axis=1)
    if np.isnan(peak).any() or np.isposinf(peak).any():
        raise ValueError("logits must not contain NaN or +inf")
    total = np.exp(tile - anchor(peak)[:, None]).sum(axis=1)
    columns = np.arange(first_column, first_column + tile.shape[1], dtype=np.int64)
    return Summary(peak, total, *leading(tile, np.broadcast_to(columns, tile.shape), k))


def combine(left, right, k):
    """The summary of two neighbouring stretches of columns."""
    peak = np.maximum(left.peak, right.peak)
    base = anchor(peak)
    total = left.total * np.exp(left.peak - base) + right.total * np.exp(right.peak - base)
    logits = np.concatenate((left.logits, right.logits), axis=1)
    indices = np.concatenate((left.indices, right.indices), axis=1)
    return Summary(peak, total, *leading(logits, indices, k))


def anchor(peak):
    """What exponents are measured from: the peak, or 0 where nothing finite was seen yet."""
    return np.where(np.isneginf(peak), 0.0, peak)


def leading(logits, indices, k):
    """The k largest entries of every row in their old order, the leftmost among equals at the cut."""
    width = logits.shape[1]
    if width <= k:
        return logits, indices
    cut = np.partition(logits, width - k, axis=1)[:, width - k, None]
    chosen = logits > cut
    level = logits == cut
    vacant = k - chosen.sum(axis=1, keepdims=True)
    chosen |= level & (np.cumsum(level, axis=1) <= vacant)
    return logits[chosen].reshape(-1, k), indices[chosen].reshape(-1, k)


def rank(summary):
    """Probabilities and indices of the entries of a summary, best first."""
    order = np.argsort(-summary.logits, axis=1, kind="stable")
    logits = np.take_along_axis(summary.logits, order, axis=1)
    indices = np.take_along_axis(summary.indices, order, axis=1)
    return np.exp(logits - summary.peak[:, None]) / summary.total[:, None], indices
