"""Lines of the gold solution that the mutants of several trap files edit."""

CHECKED = "    _check(logits, k)\n"
PROBS = "probs = np.empty((rows, k), logits.dtype)"
INDICES = "indices = np.empty((rows, k), np.int64)"
LOOP = "    for row in range(rows):\n"
CALL = "probs[row], indices[row] = _one_row(logits[row], k)"
TILE = "tile = logits[start : start + TILE].astype(np.float64)"
MERGE = "best, places = _merge(best, places, tile, start, k)"
ALL_MASKED = "    if largest == -np.inf:\n"
ANSWER = "return _weights(best, largest) / total, places"
SUM = "return new, total * _weights(largest, new) + np.sum(_weights(tile, new))"
FRESH = "fresh = np.flatnonzero(tile > best[-1]) if best.size == k else np.arange(tile.size)"
VALUES = "values = np.concatenate((best, tile[fresh]))"
PLACES = "places = np.concatenate((places, start + fresh))"
KEPT = "kept = values >= cut"
ORDER = 'order = np.argsort(-values, kind="stable")[:k]'

# What they are replaced by more than once.
ALL_VALUES = "fresh = np.arange(tile.size)"
ZEROS = (
    (PROBS, "probs = np.zeros((rows, k), logits.dtype)"),
    (INDICES, "indices = np.zeros((rows, k), np.int64)"),
)
