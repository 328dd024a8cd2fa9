"""Softmax fused with top-k, ranked by complex keys.

NumPy orders complex numbers by real part, then by imaginary part. The key
``-logit + 1j * column`` therefore sorts exactly as the ranking asks: larger
logits first, equal ones (-0 and +0 too) by column, -inf at the end. Partition
and sort of these keys need no separate care for ties.
"""

import operator

import numpy as np

TILE = 16384  # elements of work held at a time


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits = np.asarray(logits)
    if logits.dtype.kind != "f" or logits.dtype.itemsize not in (2, 4, 8):
        raise TypeError(f"logits must be float16, float32 or float64, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have two axes, not {logits.ndim}")
    k = operator.index(k)
    count, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"k must lie in 1..{vocab}, not {k}")

    probs = np.empty((count, k), logits.dtype)
    indices = np.empty((count, k), np.int64)
    # Many short rows share a tile; a long row is cut into tiles of its own. A tile
    # of at least k columns keeps the merging of a large k linear in V.
    width = min(vocab, max(TILE, k))
    height = max(1, TILE // width)
    for top in range(0, count, height):
        group = slice(top, min(top + height, count))
        keys, peak, total = _scan(logits[group], k, width)
        indices[group] = keys.imag
        with np.errstate(over="ignore", under="ignore"):
            probs[group] = np.exp(-keys.real - peak) / total
    return probs, indices


def _scan(rows, k, width):
    """Sorted best k keys, largest logit and sum of exp(logit - largest) of each row."""
    vocab = rows.shape[1]
    best = np.empty((len(rows), 0), np.complex128)
    peak = np.full((len(rows), 1), -np.inf)
    total = np.zeros((len(rows), 1))
    for left in range(0, vocab, width):
        tile = rows[:, left:left + width].astype(np.float64)
        columns = np.arange(left, left + tile.shape[1])
        peak, total = _add_exponentials(tile, peak, total)
        if best.shape[1] == k and len(rows) == 1:
            # Columns ascend, so a later entry must beat the k-th best outright.
            columns = np.flatnonzero(tile[0] > -best[0, k - 1].real)
            tile = tile[:, columns]
            columns += left
            if columns.size == 0:
                continue
        best = _merge(best, tile, columns, k)
    if np.isneginf(peak).any():
        raise ValueError("a row of logits is all -inf")
    best.sort(axis=1)
    return best, peak, total


def _add_exponentials(tile, peak, total):
    """Running (peak, total) after one more tile, the total relative to the new peak."""
    new_peak = np.maximum(peak, tile.max(axis=1, keepdims=True))
    if not (new_peak < np.inf).all():
        raise ValueError("logits contain NaN or +inf")
    shift = np.where(np.isneginf(new_peak), 0.0, new_peak)
    with np.errstate(over="ignore", under="ignore"):
        total = total * np.exp(peak - shift)
        total = total + np.exp(tile - shift).sum(axis=1, keepdims=True)
    return new_peak, total


def _merge(best, tile, columns, k):
    """The k smallest keys of best and tile, the k-th in its place; all while fewer than k."""
    held = best.shape[1]
    keys = np.empty((len(tile), held + tile.shape[1]), np.complex128)
    keys[:, :held] = best
    keys.real[:, held:] = -tile
    keys.imag[:, held:] = columns
    if keys.shape[1] > k:
        keys.partition(k - 1, axis=1)
        keys = keys[:, :k].copy()
    elif keys.shape[1] == k:
        keys.sort(axis=1)
    return keys
