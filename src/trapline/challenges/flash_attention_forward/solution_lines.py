"""Lines of the gold solution that the mutants of several trap files edit."""

ORIGIN = "np.where(new_peak == -np.inf, 0, new_peak)"
LSE = "peak + np.log(total)"
KEY_LOOP = "for start in range(0, stop, tile):"
