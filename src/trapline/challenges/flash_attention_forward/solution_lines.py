"""Lines of the gold solution that the mutants of several trap files edit."""

ORIGIN = "np.where(new_peak == -np.inf, 0, new_peak)"
LSE = "peak + np.log(total)"
SCALE = "q = q * D**-0.5"
KEY_LOOP = "for start in range(0, stop, tile):"
QUERY_LOOP = "for start in range(0, T, tile):"
COLUMNS = "cols = slice(start, min(start + tile, stop))"
MASK = "scores[_hidden(position, rows, cols)] = -np.inf"
SUM = "total = total * correction + weights.sum(axis=1)"
WEIGHTED = "weighted = weighted * correction[:, None] + weights @ v[cols]"
RETURNED = f"return weighted / total[:, None], np.where(seen, {LSE}, -np.inf)"
ATTENDED = "out[b, h, rows], lse[b, h, rows] = _attend("
CALL = "q[b, h, rows], k[b, g], v[b, g], start + S - T, causal, tile"
#: Queries that a mutant never answers look like queries that see no key.
UNANSWERED = (
    "lse = np.zeros((B, H, T), q.dtype)",
    "lse = np.full((B, H, T), -np.inf, q.dtype)",
)
