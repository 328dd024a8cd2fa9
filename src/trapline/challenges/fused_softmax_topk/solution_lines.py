"""Lines of the gold solution that the mutants of several trap files edit."""

PROBS = "probs = np.empty((rows, k), logits.dtype)"
TILE = "tile = logits[start : start + TILE].astype(np.float64)"
ANSWER = "return _weights(best, largest) / total, places"
FRESH = "fresh = np.flatnonzero(tile > best[-1]) if best.size == k else np.arange(tile.size)"
