"""Softmax fused with top-k by divide and conquer: halves of a row are summarised and merged."""

from typing import NamedTuple

import numpy as np

LEAF = 1024
ROOM = 16384


class Summary(NamedTuple):
    """What a range of columns contributes: everything a merge needs, for each row of a block."""

    peak: np.ndarray  # (rows,) largest logit
    mass: np.ndarray  # (rows,) sum of exp(logit - peak), 0 for a range that is all -inf
    values: np.ndarray  # (rows, up to k) best logits, best first
    places: np.ndarray  # (rows, up to k) their columns


def shrink(peak, reference):
    """exp(peak - reference), where nothing relative to nothing is 1."""
    same = peak == reference
    return np.exp(np.where(same, 0.0, peak - np.where(same, 0.0, reference)))


def rank(values, places, k):
    order = np.argsort(np.negative(values), axis=1, kind="stable")[:, :k]
    rows = np.arange(len(values))[:, None]
    return values[rows, order], places[rows, order]


def leaf(block, low, high, k):
    values = block[:, low:high].astype(np.float64)
    peak = values.max(axis=1)
    if np.isnan(peak).any() or (peak == np.inf).any():
        raise ValueError("logits must not contain NaN or +inf")
    base = np.where(np.isneginf(peak), 0.0, peak)
    mass = np.exp(values - base[:, None]).sum(axis=1)
    places = np.tile(np.arange(low, high), (len(values), 1))
    return Summary(peak, mass, *rank(values, places, k))


def merge(left, right, k):
    peak = np.maximum(left.peak, right.peak)
    mass = left.mass * shrink(left.peak, peak) + right.mass * shrink(right.peak, peak)
    values = np.concatenate((left.values, right.values), axis=1)
    places = np.concatenate((left.places, right.places), axis=1)
    return Summary(peak, mass, *rank(values, places, k))


def summarise(block, low, high, k):
    if high - low <= LEAF:
        return leaf(block, low, high, k)
    middle = low + (high - low) // 2
    return merge(summarise(block, low, middle, k), summarise(block, middle, high, k), k)


def solve(block, k):
    """Rows of one block; a block that is too tall is halved as well."""
    rows, columns = block.shape
    if rows > 1 and rows * (min(columns, LEAF) + k) > ROOM:
        half = rows // 2
        yield from solve(block[:half], k)
        yield from solve(block[half:], k)
        return
    summary = summarise(block, 0, columns, k)
    if np.isneginf(summary.peak).any():
        raise ValueError("a row is all -inf")
    weights = np.exp(summary.values - summary.peak[:, None])
    yield weights / summary.mass[:, None], summary.places


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    if not isinstance(logits, np.ndarray):
        raise TypeError("logits must be an ndarray")
    if logits.dtype.name not in ("float16", "float32", "float64"):
        raise TypeError("unsupported dtype " + logits.dtype.name)
    if logits.ndim != 2:
        raise ValueError("logits must have shape (N, V)")
    if k <= 0 or k > logits.shape[1]:
        raise ValueError("k is out of range")
    probs = np.empty((logits.shape[0], k), logits.dtype)
    indices = np.empty((logits.shape[0], k), np.int64)
    if logits.shape[0] == 0:
        return probs, indices
    row = 0
    with np.errstate(over="ignore", under="ignore"):
        for part_probs, part_places in solve(logits, k):
            stop = row + len(part_probs)
            probs[row:stop] = part_probs
            indices[row:stop] = part_places
            row = stop
    return probs, indices
