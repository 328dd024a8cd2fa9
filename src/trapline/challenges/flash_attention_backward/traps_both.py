"""Bugs of the forward pass, and bugs that both passes share.

Code that computes the weights in one place has its bugs in both passes. Such a bug is shown in the
forward pass, where it does not depend on what the backward pass computes again.
"""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import agrees, differentiates, draw
from trapline.challenges.flash_attention_backward.situations import BLIND, ordinary, with_logits
from trapline.challenges.flash_attention_backward.solution_lines import (
    BACKWARD_HEAD,
    CHECKED,
    DSCORES,
    FORWARD_CALL,
    FORWARD_HEAD,
    FORWARD_MASK,
    KEY_LOOP,
    RECOMPUTE,
    ROW_LOOP,
    SCORES,
    UNBOUNDED,
    UNGUARDED,
    UNHEARD,
    WEIGHTS,
    mask,
    with_saved,
)
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.cases import agrees as attention_agrees

# Parts of the gold solution that several mutants edit.
_HIDDEN = "np.arange(cols.start, cols.stop) > np.arange(position, position + rows)[:, None]"
_NEW_PEAK = "new_peak = np.maximum(peak, scores.max(axis=1))"
_TOTAL = "total = total * correction + weights.sum(axis=1)"
_WEIGHTED = "weighted = weighted * correction[:, None] + weights @ v[cols]"
_LSE = "np.where(seen, peak + np.log(total), -np.inf)"
_SCALED = "    q = q * D**-0.5\n"
_CHECKED_FORWARD = "    _check(q, k, v, tile)\n    (B, H"
_LATER = "np.arange(position + 1, position + rows + 1)"
_COLUMNS = "cols = slice(start, min(start + tile, stop))"
_WHOLE_COLUMNS = "cols = slice(start, min(start + tile, len(k)))"
_SHORT_COLS = "        cols = slice(start + (start > 0), min(start + tile, stop))\n"
_BLIND_ROWS = "\n            scores[np.arange(position, position + rows) < 0] = -np.inf"
_ORIGIN = "np.where(new_peak == -np.inf, 0, new_peak)"

# Bugs in both passes.
_CAUSAL_IGNORED = (
    (_CHECKED_FORWARD, _CHECKED_FORWARD.replace("    (B", "    causal = False\n    (B")),
    (CHECKED, CHECKED + "    causal = False\n"),
)
_UNMASKED = (_HIDDEN, "np.zeros((rows, cols.stop - cols.start), bool)")
_FIRST_KEY = (
    ("start + S - T, causal", "start, causal"),
    ("position = top + S - T", "position = top"),
)
_WRONG_SIGN = (
    ("start + S - T, causal", "start + T - S, causal"),
    ("position = top + S - T", "position = top + T - S"),
)
_NEXT_KEY = (
    (_HIDDEN, _HIDDEN.replace("np.arange(position, position + rows)", _LATER)),
    ("min(len(k), position + rows) if causal", "min(len(k), position + rows + 1) if causal"),
    ("position + rows.stop - top <= start", "position + rows.stop - top < start"),
)
_TILE_ROWS = (
    (FORWARD_MASK, FORWARD_MASK.replace("_hidden(position", "_hidden(0")),
    mask(
        "    if causal and cols.stop > position + 1:\n"
        "        scores[_hidden(0, rows, cols)] = -np.inf\n"
    ),
)
#: The mask has the offset S - T, but counts queries from the start of their tile, and tiles begin
#: with the first query that sees a key of theirs. A query that is left without keys is NaN.
_TILES_FROM_THE_FIRST_SEEING = edits(
    ("import numpy as np\n", "import numpy as np\n\n_TOP = [0]\n"),
    (FORWARD_HEAD, FORWARD_HEAD.replace("range(0,", "range(max(0, T - S) if causal else 0,")),
    ("lse = np.zeros((B, H, T), q.dtype)", "lse = np.full((B, H, T), -np.inf, q.dtype)"),
    (FORWARD_CALL, "            _TOP[0] = start\n" + FORWARD_CALL),
    (FORWARD_MASK, FORWARD_MASK.replace("_hidden(position", "_hidden(position - _TOP[0]")),
    (_ORIGIN, "new_peak"),
    ("seen = total > 0", "seen = ~(total <= 0)"),
    (ROW_LOOP, ROW_LOOP.replace("range(0,", "range(max(0, start + T - S) if causal else 0,")),
    ("position = top + S - T", "_TOP[0], position = top, top + S - T"),
    mask(
        "    if causal and cols.stop > position + 1:\n"
        "        scores[_hidden(position - _TOP[0], rows, cols)] = -np.inf\n"
    ),
    UNBOUNDED,
)
_MODULO_HEADS = (
    (FORWARD_HEAD, FORWARD_HEAD.replace("h // (H // G)", "h % G")),
    (BACKWARD_HEAD, BACKWARD_HEAD.replace("h // (H // G)", "h % G")),
)
_DIVIDED_HEADS = (
    (FORWARD_HEAD, FORWARD_HEAD.replace("h // (H // G)", "h // G")),
    (BACKWARD_HEAD, BACKWARD_HEAD.replace("h // (H // G)", "h // G")),
)
_UNSCALED = (
    (_SCALED, ""),
    (SCORES, "scores = q @ k[cols].T"),
    (DSCORES, "dscores = weights * (dweights - delta[b, h, rows, None])"),
)
_WITHOUT_ROOT = (
    (_SCALED, _SCALED.replace("D**-0.5", "D**-1.0")),
    (SCORES, SCORES.replace("D**-0.5", "D**-1.0")),
    (DSCORES, DSCORES.replace("D**-0.5", "D**-1.0")),
)


def _mild(score: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Hidden scores have this value in the forward pass, and in the backward pass."""
    return (
        (FORWARD_MASK, FORWARD_MASK.replace("-np.inf", score) + _BLIND_ROWS),
        mask(f"    if causal:\n        scores[_hidden(position, rows, cols)] = {score}\n"),
    )


# --- the mask in both passes ----------------------------------------------------------------------


def causal_forward(submission: Submission, rng: np.random.Generator) -> None:
    """Eight positions in tiles of four."""
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=4)


def causal_forward_with_a_past(submission: Submission, rng: np.random.Generator) -> None:
    """Four queries on six keys: every query sees at least three."""
    attends(submission, *Shape(T=4, S=6).draw(rng), causal=True, tile=8)


_SQUARE = "    causal = causal and q.shape[2] == k.shape[2]\n"
_FORWARD_SQUARE = ("causal, tile\n            )", "causal and T == S, tile\n            )")


@trap(
    catches="causal=True hides nothing where there are more queries than keys, or another number",
    severity="major",
    story="A mask that is made for self-attention is left out where the lengths differ.",
    mutant=edits(_FORWARD_SQUARE, (CHECKED, CHECKED + _SQUARE)),
    also=[
        edits(_FORWARD_SQUARE),
        edits((CHECKED, CHECKED + _SQUARE)),
        edits((CHECKED, CHECKED + _SQUARE), UNBOUNDED),
        edits(_FORWARD_SQUARE, RECOMPUTE),
    ],
    control=causal_forward,
)
def causal_only_if_square(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((8, 5), (5, 8)):
        arguments = draw(Shape(T=T, S=S), rng, True)
        attends(submission, *arguments[1:4], causal=True, tile=4)
        differentiates(submission, arguments, causal=True, tile=4)


@trap(
    catches="causal is ignored in both passes",
    severity="major",
    story="The argument is accepted and never read.",
    mutant=edits(*_CAUSAL_IGNORED, RECOMPUTE),
    also=with_saved(*_CAUSAL_IGNORED),
    control=ordinary,
)
def causal_ignored(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward(submission, rng)


@trap(
    catches="tiles on the diagonal are not masked, in both passes",
    severity="critical",
    story="A shortcut takes a tile that the diagonal crosses for one that is seen whole.",
    mutant=edits(_UNMASKED, RECOMPUTE),
    also=with_saved(_UNMASKED),
    seen=BLIND,
    control=ordinary,
)
def diagonal_unmasked(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward(submission, rng)


@trap(
    catches="the mask hides a query's own key in both passes",
    severity="critical",
    story=">= where > is meant.",
    mutant=edits((_HIDDEN, _HIDDEN.replace(" > ", " >= ")), RECOMPUTE),
    also=[edit(_HIDDEN, _HIDDEN.replace(" > ", " >= "))],
    seen=BLIND,
    control=ordinary,
)
def own_key_hidden(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward_with_a_past(submission, rng)


@trap(
    catches="the mask shows one key of the future in both passes",
    severity="critical",
    story="A triangle one diagonal too high.",
    mutant=edits(_NEXT_KEY[0], RECOMPUTE),
    also=[edits(*_NEXT_KEY, RECOMPUTE), *with_saved(_NEXT_KEY[0]), *with_saved(*_NEXT_KEY)],
    seen=BLIND,
    control=ordinary,
)
def next_key_seen(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward(submission, rng)


@trap(
    catches="the mask is aligned to the first key in both passes",
    severity="critical",
    story="With T = S the offset S − T is 0, and most tests have T = S.",
    mutant=edits(*_FIRST_KEY, RECOMPUTE),
    also=[*with_saved(*_FIRST_KEY), edits(*_FIRST_KEY, UNBOUNDED, UNHEARD)],
    seen=BLIND,
    control=ordinary,
)
def aligned_to_the_first_key(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward_with_a_past(submission, rng)


@trap(
    catches="the offset of the mask has the wrong sign: T − S instead of S − T",
    severity="major",
    story="With T = S both are 0.",
    mutant=edits(*_WRONG_SIGN, RECOMPUTE),
    also=with_saved(*_WRONG_SIGN),
    control=ordinary,
)
def offset_with_wrong_sign(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward_with_a_past(submission, rng)


@trap(
    catches="the first S − T queries are left out of causal attention",
    severity="critical",
    story="Where the first query that sees a key is computed with the offset's sign reversed.",
    mutant=edits(
        (
            "    return out, lse\n",
            "    if causal and S > T:\n"
            "        out[:, :, : S - T], lse[:, :, : S - T] = 0, -np.inf\n"
            "    return out, lse\n",
        ),
        RECOMPUTE,
    ),
    seen=BLIND,
    control=ordinary,
)
def first_queries_left_out(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward_with_a_past(submission, rng)


@trap(
    catches="the mask counts queries from the start of their tile instead of the sequence",
    severity="critical",
    story="Right in the first tile; every later tile is masked too much.",
    mutant=edits(*_TILE_ROWS, RECOMPUTE),
    also=(*with_saved(*_TILE_ROWS), _TILES_FROM_THE_FIRST_SEEING),
    seen=BLIND,
    control=ordinary,
)
def mask_in_tile_coordinates(submission: Submission, rng: np.random.Generator) -> None:
    causal_forward(submission, rng)


@trap(
    catches="a tile of which only its first key is visible, and to the last query only, is skipped",
    severity="critical",
    story="An off-by-one in the test for hidden tiles; tiles of one row show it at once.",
    mutant=edits(
        (
            KEY_LOOP,
            KEY_LOOP
            + "        if causal and start >= position + rows - 1:\n            continue\n",
        ),
        ("<= start:\n", "<= start + 1:\n"),
        RECOMPUTE,
    ),
    seen=BLIND,
    control=ordinary,
)
def last_visible_tile_skipped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng), causal=True, tile=1)


@trap(
    catches="a query skips a key tile of which it sees only a part, in both passes",
    severity="critical",
    story="The test for tiles that are hidden as a whole asks for the last key of the tile.",
    mutant=edits(
        (_COLUMNS, _WHOLE_COLUMNS),
        ("if causal and cols.stop > position + 1:", "if causal:"),
        (
            _HIDDEN,
            "np.broadcast_to(cols.stop - 1 > np.arange(position, position + rows)[:, None], "
            "(rows, cols.stop - cols.start))",
        ),
        RECOMPUTE,
    ),
    seen=BLIND,
    control=ordinary,
)
def partly_visible_tile_skipped(submission: Submission, rng: np.random.Generator) -> None:
    """Six queries, eight keys, tiles of four: no query tile ends with a key tile."""
    attends(submission, *Shape(T=6, S=8).draw(rng), causal=True, tile=4)


@trap(
    catches="maximum and sum leave out the last tile of keys that later queries of a tile see",
    severity="critical",
    story="The loop for the row sums ends at the key of the tile's first query.",
    mutant=edits(
        (_TOTAL, _TOTAL + " * (start <= position or not causal)"),
        RECOMPUTE,
    ),
    seen=BLIND,
    control=ordinary,
)
def sums_end_at_the_first_query(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), causal=True, tile=4)


@trap(
    catches="in the rows of a group the positions are repeated element by element, not per head",
    severity="critical",
    story="np.repeat for np.tile when the query heads of a group are folded into rows.",
    mutant=edits(
        (
            FORWARD_CALL,
            "            for t in range(start, min(start + tile, T)):\n"
            "                n = H // G\n"
            "                place = (h % n * T + t) // n + S - T\n"
            "                one = slice(t, t + 1)\n"
            "                out[b, h, one], lse[b, h, one] = _attend(\n"
            "                    q[b, h, one], k[b, g], v[b, g], place, causal, tile\n"
            "                )\n",
        ),
        RECOMPUTE,
    ),
    seen=BLIND,
    control=ordinary,
)
def positions_of_folded_rows(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=2, G=1, T=4, S=4).draw(rng), causal=True, tile=8)


def low_scores(submission: Submission, rng: np.random.Generator) -> None:
    """Scores far below 0, every key visible."""
    for low in (-3e4, -3e10):
        _, q, k, v, _, _ = with_logits(rng, [low] * 4, 4, False)
        attends(submission, q, k, v, tile=8)


@trap(
    catches="hidden scores are finite, such as −1e4 or −1e9, and real scores can be below them",
    severity="critical",
    story="A finite mask gives hidden keys all the weight where the real scores are lower.",
    mutant=edits(*_mild("-1e4"), RECOMPUTE),
    also=[
        edits(*_mild("-1e4")),
        edits(*_mild("-1e9"), RECOMPUTE),
        edits(*_mild("-1e9")),
        edits(_mild("-1e9")[0]),
        edits(_mild("-1e4")[0]),
    ],
    seen=BLIND,
    control=low_scores,
)
def mask_too_mild(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e4, -3e10):
        _, q, k, v, _, _ = with_logits(rng, [low] * 4, 4, True)
        attends(submission, q, k, v, causal=True, tile=8)


def _added(number: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """The number is added to the hidden scores of both passes, except in rows without a key."""
    lines = (
        "{0}scores += np.where(_hidden(position, rows, cols), {1}, 0)\n"
        "{0}scores[np.arange(position, position + rows) < 0] = -np.inf"
    )
    forward, backward = lines.format(" " * 12, number), lines.format(" " * 8, number)
    return (
        (FORWARD_MASK, f"position + 1:\n{forward}"),
        mask(f"    if causal:\n{backward}\n"),
    )


def no_hidden_preference(submission: Submission, rng: np.random.Generator) -> None:
    """Causal, and no hidden score is larger than a visible one."""
    arguments = with_logits(rng, [0.0] * 6, 6, True)
    attends(submission, *arguments[1:4], causal=True, tile=8)
    differentiates(submission, arguments, causal=True, tile=8)


@trap(
    catches="a large finite number is added to hidden scores, and one that is larger by more wins",
    severity="major",
    story="scores + mask · (−1e9) keeps the differences between hidden scores: a hidden score that "
    "lies far enough above the visible ones is still the largest.",
    mutant=edits(*_added("-1e9"), RECOMPUTE),
    also=[
        edits(*_added("-1e9")),
        edits(*_added("-1e9"), UNBOUNDED),
        edits(_added("-1e9")[0]),
        edits(*_added("-1e4"), RECOMPUTE),
        edits(*_added("-1e4")),
    ],
    control=no_hidden_preference,
)
def finite_mask_added(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e6, -3e10):
        arguments = with_logits(rng, [low, 0.0, 0.0, 0.0, 0.0, 0.0], 6, True)
        attends(submission, *arguments[1:4], causal=True, tile=8)
        differentiates(submission, arguments, causal=True, tile=8)


# --- heads and scale in both passes ---------------------------------------------------------------


@trap(
    catches="both passes pair query head h with kv head h mod G",
    severity="critical",
    story="Heads interleaved instead of grouped.",
    mutant=edits(*_MODULO_HEADS, RECOMPUTE),
    also=with_saved(*_MODULO_HEADS),
    seen=BLIND,
    control=ordinary,
)
def heads_interleaved(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=4, S=4).draw(rng))


@trap(
    catches="both passes pair query head h with kv head h // G",
    severity="major",
    story="H = 4, G = 2 hides it, because there H/G = G.",
    mutant=edits(*_DIVIDED_HEADS, RECOMPUTE),
    also=with_saved(*_DIVIDED_HEADS),
    control=ordinary,
)
def heads_by_wrong_divisor(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=4).draw(rng))


@trap(
    catches="a tile smaller than the number of query heads in a group fails",
    severity="major",
    story="The tile is divided among the heads of a group and becomes 0.",
    mutant=edits(
        (FORWARD_HEAD, FORWARD_HEAD.replace("tile)", "tile if tile >= H // G else 0)")),
        (ROW_LOOP, ROW_LOOP.replace("tile)", "tile if tile >= H // G else 0)")),
    ),
    seen=BLIND,
    control=ordinary,
)
def tile_smaller_than_group(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=3, G=1, T=4, S=4).draw(rng), tile=2)


def scaled_forward(submission: Submission, rng: np.random.Generator) -> None:
    """Width 9, scale 1/3; five queries, so that no other size has this scale."""
    attends(submission, *Shape(T=5, S=5, D=9).draw(rng))


@trap(
    catches="the scale D^-½ is missing in both passes",
    severity="major",
    story="Scores of wide heads become too large.",
    mutant=edits(*_UNSCALED, RECOMPUTE),
    also=with_saved(*_UNSCALED),
)
def scale_missing(submission: Submission, rng: np.random.Generator) -> None:
    scaled_forward(submission, rng)


@trap(
    catches="the scale is 1/D instead of D^-½",
    severity="major",
    story="The square root is missing.",
    mutant=edits(*_WITHOUT_ROOT, RECOMPUTE),
    also=with_saved(*_WITHOUT_ROOT),
)
def scale_without_root(submission: Submission, rng: np.random.Generator) -> None:
    scaled_forward(submission, rng)


@trap(
    catches="the scale is taken from the number of queries, T^-½ instead of D^-½",
    severity="critical",
    story="The wrong axis of a shape.",
    mutant=edits(
        (_SCALED, _SCALED.replace("D**-0.5", "max(rows, 1) ** -0.5")),
        (SCORES, SCORES.replace("D**-0.5", "max(rows, 1) ** -0.5")),
        (DSCORES, DSCORES.replace("D**-0.5", "max(T, 1) ** -0.5")),
        RECOMPUTE,
    ),
    seen=BLIND,
)
def scale_from_another_axis(submission: Submission, rng: np.random.Generator) -> None:
    scaled_forward(submission, rng)


@trap(
    catches="queries are rounded to float32 in both passes, also in float64 calls",
    severity="major",
    story="A cast for speed that stays in.",
    mutant=edits(
        (_SCALED, "    q = (q.astype(np.float32) * np.float32(D**-0.5)).astype(q.dtype)\n"),
        (CHECKED, CHECKED + "    q = q.astype(np.float32).astype(q.dtype)\n"),
        RECOMPUTE,
    ),
    seen=BLIND,
)
def queries_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5, D=4).draw(rng))


# --- the running softmax --------------------------------------------------------------------------


def rising_maximum(submission: Submission, rng: np.random.Generator) -> None:
    """Two tiles of keys; the maximum of every row lies in the second."""
    _, q, k, v, _, _ = with_logits(rng, [0.0, 0.5, 0.25, 0.0, 2.0, 2.5, 2.0, 3.0], 4, False)
    attends(submission, q, k, v, tile=4)


def large_scores(submission: Submission, rng: np.random.Generator) -> None:
    """Scores of 2000, whose exponentials overflow."""
    _, q, k, v, _, _ = with_logits(rng, [2000.0, 1999.0, 2001.0, 2000.0], 3, False)
    attends(submission, q, k, v, tile=8)


@trap(
    catches="the weighted sum is not rescaled when the maximum rises in the forward pass",
    severity="major",
    story="Only the sum of weights is; results depend on the tiles.",
    mutant=edit(_WEIGHTED, "weighted = weighted + weights @ v[cols]"),
    seen=BLIND,
    control=ordinary,
)
def forward_sums_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    rising_maximum(submission, rng)


@trap(
    catches="the weighted sums of the running softmax are not rescaled when the maximum rises",
    severity="critical",
    story="Only the sum of weights is; results depend on the tiles, in both passes.",
    mutant=edits((_WEIGHTED, "weighted = weighted + weights @ v[cols]"), RECOMPUTE),
    seen=BLIND,
    control=ordinary,
)
def sums_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    rising_maximum(submission, rng)


@trap(
    catches="the sum of weights is not rescaled when the maximum rises in the forward pass",
    severity="major",
    story="The weighted sum is, the sum is not; out and lse are wrong with two tiles of keys.",
    mutant=edit(_TOTAL, "total = total + weights.sum(axis=1)"),
    seen=BLIND,
    control=ordinary,
)
def forward_total_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    rising_maximum(submission, rng)


@trap(
    catches="the sum of weights of the running softmax is not rescaled, in both passes",
    severity="critical",
    story="Partial softmaxes are merged by adding their sums although their maxima differ.",
    mutant=edits((_TOTAL, "total = total + weights.sum(axis=1)"), RECOMPUTE),
    seen=BLIND,
    control=ordinary,
)
def total_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    rising_maximum(submission, rng)


_NO_PEAK = (_NEW_PEAK, "new_peak = np.zeros(rows, q.dtype)")


@trap(
    catches="no maximum is subtracted in the forward pass, so that large scores overflow",
    severity="major",
    story="exp of the bare scores is inf beyond 88 in float32 and 709 in float64.",
    mutant=edits(_NO_PEAK),
    also=[
        edits(_NO_PEAK, UNGUARDED),
        # The maximum is divided out of exponentials that were taken of the raw scores.
        edit(
            "weights = np.exp(scores - origin[:, None])",
            "weights = np.exp(scores) / np.exp(origin[:, None])",
        ),
    ],
    seen=BLIND,
    control=ordinary,
)
def forward_maximum_forgotten(submission: Submission, rng: np.random.Generator) -> None:
    large_scores(submission, rng)


@trap(
    catches="no maximum is subtracted in either pass, so that large scores overflow",
    severity="critical",
    story="exp of the bare scores is inf beyond 88 in float32 and 709 in float64.",
    mutant=edits(_NO_PEAK, RECOMPUTE),
    also=[
        edits(_NO_PEAK, UNGUARDED, RECOMPUTE),
        edits(_NO_PEAK, UNGUARDED, (WEIGHTS, "return np.exp(scores) / np.exp(finite)[:, None]")),
    ],
    seen=BLIND,
    control=ordinary,
)
def maximum_forgotten(submission: Submission, rng: np.random.Generator) -> None:
    large_scores(submission, rng)


@trap(
    catches="the maximum of the last tile replaces the running maximum in the forward pass",
    severity="major",
    story="Earlier tiles with larger scores are scaled up instead of down and may overflow.",
    mutant=edit(_NEW_PEAK, "new_peak = scores.max(axis=1)"),
    control=ordinary,
)
def forward_maximum_of_the_last_tile(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [2000.0, 1999.0, 1.0, 2.0], 3, False)
    attends(submission, q, k, v, tile=2)


@trap(
    catches="out is not divided by the sum of weights",
    severity="major",
    story="The last line of the forward pass is missing.",
    mutant=edit("weighted / total[:, None]", "weighted"),
)
def forward_not_normalised(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng))


@trap(
    catches="a key is lost where two tiles meet",
    severity="critical",
    story="The second part begins one after the place where the first one ends.",
    mutant=edits(
        ("        cols = slice(start, min(start + tile, stop))\n", _SHORT_COLS),
        RECOMPUTE,
    ),
    seen=BLIND,
    control=ordinary,
)
def key_lost_between_tiles(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=8).draw(rng), tile=4)


@trap(
    catches="keys behind the last whole tile are not read in the forward pass",
    severity="major",
    story="The number of tiles is rounded down.",
    mutant=edit(KEY_LOOP, KEY_LOOP.replace("stop, tile", "stop - stop % tile, tile")),
    control=ordinary,
)
def forward_last_key_tile_dropped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), tile=4)


@trap(
    catches="queries behind the last whole tile get no result in the forward pass",
    severity="major",
    story="The number of tiles is rounded down.",
    mutant=edit(FORWARD_HEAD, FORWARD_HEAD.replace("range(0, T,", "range(0, T - T % tile,")),
    control=ordinary,
)
def forward_last_query_tile_dropped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=4).draw(rng), tile=4)


@trap(
    catches="a query without keys that shares a tile with others becomes NaN in out and lse",
    severity="critical",
    story="−inf − (−inf) for one row, and a sum that is not tested for NaN.",
    mutant=edits((_ORIGIN, "new_peak"), ("seen = total > 0", "seen = total != 0"), RECOMPUTE),
    seen=BLIND,
    control=ordinary,
)
def blind_query_in_a_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=4).draw(rng), causal=True, tile=2)


@trap(
    catches="in the forward pass a query without keys that shares a tile with others becomes NaN",
    severity="critical",
    story="−inf − (−inf) where two parts are merged that a query sees nothing of.",
    mutant=edits((_ORIGIN, "new_peak"), ("seen = total > 0", "seen = total != 0")),
    seen=BLIND,
    control=ordinary,
)
def forward_blind_query_in_a_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=4).draw(rng), causal=True, tile=2)


# --- what the forward pass returns ----------------------------------------------------------------


def four_by_four(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng))


@trap(
    catches="lse is a logarithm to base 2, or mixes a natural maximum with one",
    severity="major",
    story="out is right, and only a backward pass by another author sees it.",
    mutant=edit("np.log(total)", "np.log2(total)"),
    also=[edit("peak + np.log(total)", "(peak + np.log(total)) / np.log(2.0)")],
    seen=BLIND,
)
def forward_lse_in_base_two(submission: Submission, rng: np.random.Generator) -> None:
    four_by_four(submission, rng)


@trap(
    catches="lse takes another function of the sum than its natural logarithm: log10 or log1p",
    severity="major",
    story="log1p(x) is log(1 + x): it looks more careful and is another number.",
    mutant=edit("np.log(total)", "np.log1p(total)"),
    also=[edit("np.log(total)", "np.log10(total)")],
)
def forward_lse_by_another_logarithm(submission: Submission, rng: np.random.Generator) -> None:
    four_by_four(submission, rng)


@trap(
    catches="lse is the logarithm of a mean: log(S) is subtracted",
    severity="major",
    story="mean for sum in a one-line reduction.",
    mutant=edit(_LSE, _LSE.replace("np.log(total)", "np.log(total / max(len(k), 1))")),
)
def forward_lse_of_a_mean(submission: Submission, rng: np.random.Generator) -> None:
    four_by_four(submission, rng)


@trap(
    catches="lse is 0, or another number, instead of −inf for a query that sees no key",
    severity="major",
    story="The array starts with zeros, and these rows are never written.",
    mutant=edit(_LSE, _LSE.replace("-np.inf)", "0)")),
    also=[
        edit(_LSE, _LSE.replace("-np.inf)", f"{number})"))
        for number in ("np.inf", "np.nan", "-1e30", "-1e9", "np.finfo(q.dtype).min")
    ],
    seen=BLIND,
    control=ordinary,
)
def forward_lse_zero_without_keys(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=4).draw(rng), causal=True, tile=8)


def exact_float32(submission: Submission, rng: np.random.Generator) -> None:
    """One key and scores of 0: out and lse have no rounding, so that only the dtype can differ."""
    q, k, v = Shape(T=4, S=1).draw(rng, np.float32)
    attends(submission, 0 * q, k, v)


@trap(
    catches="lse is float64 although the inputs are float32",
    severity="minor",
    story="A wide accumulator is returned as it is.",
    mutant=edit("    return out, lse\n", "    return out, lse.astype(np.float64)\n"),
    seen=BLIND,
    control=ordinary,
)
def forward_lse_in_double(submission: Submission, rng: np.random.Generator) -> None:
    exact_float32(submission, rng)


@trap(
    catches="out is float64 although the inputs are float32",
    severity="minor",
    story="An allocation without a dtype.",
    mutant=edit("    return out, lse\n", "    return out.astype(np.float64), lse\n"),
    control=ordinary,
)
def forward_out_in_double(submission: Submission, rng: np.random.Generator) -> None:
    exact_float32(submission, rng)


def full_when_asked(submission: Submission, rng: np.random.Generator) -> None:
    """The same, and `causal` is given."""
    arguments = draw(Shape(T=6, S=6), rng, False)
    attends(submission, *arguments[1:4], causal=False, tile=4)
    differentiates(submission, arguments, causal=False, tile=4)


_FORWARD, _BACKWARD = (
    (f"causal: bool = False,{end}", f"causal: bool = True,{end}") for end in (" tile", "\n")
)


@trap(
    catches="without the argument `causal` a pass is causal",
    severity="major",
    story="The default of the model at hand; or one of both passes has another default.",
    mutant=edits(_FORWARD, _BACKWARD),
    also=[edits(_FORWARD), edits(_BACKWARD)],
    control=full_when_asked,
)
def causal_by_default(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=6, S=6), rng, False)
    q, k, v = arguments[1:4]
    attention_agrees(submission.flash_attention(q, k, v), q, k, v, causal=False)
    agrees(submission.flash_attention_backward(*arguments), arguments, causal=False)
