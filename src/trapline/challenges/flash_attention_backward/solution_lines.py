"""Lines of the gold solution that the mutants of several trap files edit."""

from trapline.arena.judge.traps import Mutant, edits

CHECKED = "    _check_saved(dout, q, out, lse)\n"
ROW_LOOP = "            for top in range(0, T, tile):\n"
SCORES = "scores = q @ k[cols].T * D**-0.5"
BACKWARD_MASK = (
    "    if causal:\n        scores[_hidden(position, rows, cols)] = -np.inf\n    # A row without"
)
WEIGHTS = "return np.exp(np.minimum(scores - finite[:, None], 0))"
#: Without the bound of 1: most answers have none, and weights from a wrong score exceed 1.
UNBOUNDED = (WEIGHTS, "return np.exp(scores - finite[:, None])")
#: Without zeros for dout of rows that see no key: answers that skip such rows need none.
UNHEARD = ("    dout = _heard(dout, lse)\n", "")
DSCORES = "dscores = weights * (dweights - delta[b, h, rows, None]) * D**-0.5"
#: The forward pass's heads and its tile of queries.
FORWARD_HEAD = "        g = h // (H // G)\n        for start in range(0, T, tile):"
BACKWARD_HEAD = "        g = h // (H // G)\n        for start in range(0, S, tile):"
FORWARD_CALL = (
    "            rows = slice(start, start + tile)\n"
    "            out[b, h, rows], lse[b, h, rows] = _attend(\n"
    "                q[b, h, rows], k[b, g], v[b, g], start + S - T, causal, tile\n"
    "            )\n"
)
FORWARD_MASK = "position + 1:\n            scores[_hidden(position, rows, cols)] = -np.inf"
KEY_LOOP = "    for start in range(0, stop, tile):\n"
#: The backward pass makes out and lse again, so that what is wrong there is wrong in both passes.
RECOMPUTE = (
    CHECKED,
    CHECKED + "    out, lse = flash_attention(q, k, v, causal=causal, tile=tile)\n",
)
#: Both passes begin at the first query that sees a key, so that tiles lie elsewhere where T > S.
SKIP_BLIND = (
    (FORWARD_HEAD, FORWARD_HEAD.replace("range(0,", "range(max(0, T - S) if causal else 0,")),
    (ROW_LOOP, ROW_LOOP.replace("range(0,", "range(max(0, T - S) if causal else 0,")),
    ("lse = np.zeros((B, H, T), q.dtype)", "lse = np.full((B, H, T), -np.inf, q.dtype)"),
)
#: Only rows that see no key are guarded, so that a sum of 0 divides.
UNGUARDED = (
    "seen = total > 0",
    "seen = (np.arange(position, position + rows) >= 0 if causal else True)"
    " & np.full(rows, len(k) > 0)",
)


def in_both(mutant: Mutant) -> Mutant:
    """A bug of the forward pass, with a backward pass that makes out and lse again."""
    return edits(*mutant.edits, RECOMPUTE)


def with_saved(*pairs: tuple[str, str]) -> tuple[Mutant, Mutant]:
    """A bug of both passes whose backward pass takes out and lse as they are given."""
    return edits(*pairs), edits(*pairs, UNBOUNDED)


def mask(text: str) -> tuple[str, str]:
    """The backward pass's two lines of masking, replaced."""
    return BACKWARD_MASK, text + "    # A row without"
