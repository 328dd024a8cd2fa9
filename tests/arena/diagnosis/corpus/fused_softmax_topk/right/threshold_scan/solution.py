"""Softmax fused with top-k: find each row's cut-off value, then collect what lies above it.

The logits are read twice, tile by tile. The first scan keeps the k largest values (values
only, no indices), the running maximum and the running sum of exponentials of each row. The
smallest kept value is the cut-off. The second scan walks the row from left to right and takes
everything above the cut-off, plus the first few entries equal to it, so that the lower index
wins. Only k entries per row are sorted at the end.
"""

import operator

import numpy as np

TILE_ELEMENTS = 32768
TILE_COLUMNS = 4096
FLOAT_TYPES = (np.float16, np.float32, np.float64)


def softmax_topk(logits, k):
    """(probs, indices), both (N, k), for logits (N, V)."""
    logits = np.asarray(logits)
    k = operator.index(k)
    _check_arguments(logits, k)
    n_rows, vocabulary = logits.shape

    columns = min(vocabulary, max(TILE_COLUMNS, k))
    rows = max(1, TILE_ELEMENTS // (columns + k))

    probs = np.empty((n_rows, k), dtype=logits.dtype)
    indices = np.empty((n_rows, k), dtype=np.int64)
    for top in range(0, n_rows, rows):
        band = logits[top : top + rows]
        peak, total, kept = _scan_values(band, k, columns)
        values, places = _collect(band, kept, columns)

        order = np.argsort(-values, axis=1, kind="stable")
        values = np.take_along_axis(values, order, axis=1)
        indices[top : top + rows] = np.take_along_axis(places, order, axis=1)
        with np.errstate(over="ignore", under="ignore"):
            probs[top : top + rows] = np.exp(values - peak[:, None]) / total[:, None]
    return probs, indices


def _check_arguments(logits, k):
    if logits.ndim != 2:
        raise ValueError(f"logits must have rank 2, got rank {logits.ndim}")
    if logits.dtype.type not in FLOAT_TYPES:
        raise TypeError(f"logits must be float16, float32 or float64, got {logits.dtype}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must lie in 1..{logits.shape[1]}, got {k}")


def _tiles(band, columns):
    """(first column, float64 copy) of the pieces of a band of rows, from left to right."""
    for left in range(0, band.shape[1], columns):
        yield left, band[:, left : left + columns].astype(np.float64)


def _scan_values(band, k, columns):
    """Per row: the maximum, the sum of exp(logit - maximum), the k largest values unordered."""
    height = band.shape[0]
    peak = np.full(height, -np.inf)
    total = np.zeros(height)
    kept = np.full((height, k), -np.inf)
    for _, tile in _tiles(band, columns):
        tile_peak = tile.max(axis=1)
        if not (tile_peak < np.inf).all():
            raise ValueError("logits contain NaN or +inf")

        pool = np.concatenate((kept, tile), axis=1)
        pool.partition(pool.shape[1] - k, axis=1)
        kept = pool[:, -k:].copy()
        del pool

        new_peak = np.maximum(peak, tile_peak)
        shift = np.where(new_peak == -np.inf, 0.0, new_peak)
        with np.errstate(over="ignore", under="ignore"):
            total *= np.exp(peak - shift)
            np.subtract(tile, shift[:, None], out=tile)
            np.exp(tile, out=tile)
        total += tile.sum(axis=1)
        peak = new_peak
    if (peak == -np.inf).any():
        raise ValueError("a row of logits is all -inf")
    return peak, total, kept


def _collect(band, kept, columns):
    """Values and column numbers of the chosen entries, in the order of their columns."""
    cutoff = kept.min(axis=1)[:, None]
    ties_left = (kept == cutoff).sum(axis=1)
    filled = np.zeros(len(kept), dtype=np.int64)
    values = np.empty(kept.shape)
    places = np.empty(kept.shape, dtype=np.int64)
    for left, tile in _tiles(band, columns):
        tied = tile == cutoff
        tied &= np.cumsum(tied, axis=1, dtype=np.int32) <= ties_left[:, None]
        ties_left -= tied.sum(axis=1)

        chosen = (tile > cutoff) | tied
        row, column = np.nonzero(chosen)
        counts = chosen.sum(axis=1)
        first = np.cumsum(counts) - counts
        slot = np.arange(len(row)) - first[row] + filled[row]
        values[row, slot] = tile[row, column]
        places[row, slot] = column + left
        filled += counts
    return values, places
