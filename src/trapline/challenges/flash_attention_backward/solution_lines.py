"""Lines of the gold solution that the mutants of several trap files edit."""

CHECKED = "    _check_saved(dout, q, out, lse)\n"
ROW_LOOP = "            for top in range(0, T, tile):\n"
SCORES = "scores = q @ k[cols].T * D**-0.5"
BACKWARD_MASK = (
    "    if causal:\n        scores[_hidden(position, rows, cols)] = -np.inf\n    # A row without"
)
WEIGHTS = "return np.exp(np.minimum(scores - finite[:, None], 0))"
DSCORES = "dscores = weights * (dweights - delta[b, h, rows, None]) * D**-0.5"


def mask(text: str) -> tuple[str, str]:
    """The backward pass's two lines of masking, replaced."""
    return BACKWARD_MASK, text + "    # A row without"
