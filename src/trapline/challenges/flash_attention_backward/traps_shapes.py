"""Bugs of causality, tiles, heads, and of state kept between calls."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import (
    agrees,
    differentiates,
    draw,
    saved_in_scope,
)
from trapline.challenges.flash_attention_backward.situations import (
    BLIND,
    grouped,
    ordinary,
    with_logits,
)
from trapline.challenges.flash_attention_backward.solution_lines import (
    BACKWARD_HEAD,
    CHECKED,
    ROW_LOOP,
    UNBOUNDED,
    mask,
)
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.cases import agrees as attention_agrees

# Parts of the gold solution that several mutants edit.
_NEXT_KEY = mask("    if causal:\n        scores[_hidden(position + 1, rows, cols)] = -np.inf\n")
_ZEROED = mask("    if causal:\n        scores[_hidden(position, rows, cols)] = 0\n")
_TILED_HEADS = BACKWARD_HEAD.replace("h // (H // G)", "h % G")
_DIVIDED_HEADS = BACKWARD_HEAD.replace("h // (H // G)", "h // G")
_BUFFERS = '"""\n\nimport numpy as np\n'

# --- causal ---------------------------------------------------------------------------------------


def causal_square(submission: Submission, rng: np.random.Generator) -> None:
    """Eight positions in tiles of four."""
    differentiates(submission, draw(Shape(T=8, S=8), rng, True), causal=True, tile=4)


@trap(
    catches="the backward pass omits the causal mask",
    severity="major",
    story="Hidden tiles are skipped, but the mask inside the diagonal tile is missing.",
    mutant=edits(mask("")),
    also=[edits(mask(""), UNBOUNDED)],
    seen=BLIND,
    control=ordinary,
)
def mask_missing(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    catches="the backward pass normalises its weights by sums that include hidden keys",
    severity="critical",
    story="The sums are formed again, and the mask is applied to the weights only.",
    mutant=insert_after(
        CHECKED,
        "    whole = flash_attention(q, k, v, tile=tile)[1]\n"
        "    lse = np.where(lse == -np.inf, lse, whole)\n",
    ),
    seen=BLIND,
    control=ordinary,
)
def hidden_keys_in_the_normaliser(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    catches="the row sums of dout · out are taken from the first batch entry for all entries",
    severity="critical",
    story="One index too few, or a broadcast; a batch of one is right.",
    mutant=edit("delta = (dout * out).sum(axis=-1)", "delta = (dout * out[:1]).sum(axis=-1)"),
    also=[
        edit("delta = (dout * out).sum(axis=-1)", "delta = (dout[:1] * out).sum(axis=-1)"),
        edit(
            "delta = (dout * out).sum(axis=-1)",
            "delta = np.repeat((dout * out).sum(axis=-1)[:1], B, axis=0)",
        ),
    ],
    seen=BLIND,
    control=ordinary,
)
def delta_of_the_first_batch(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(B=2, T=4, S=4), rng, False), tile=4)


@trap(
    catches="the backward mask hides the diagonal",
    severity="major",
    story="≥ instead of > in one of two masks that must be the same.",
    mutant=edits(
        mask("    if causal:\n        scores[_hidden(position - 1, rows, cols)] = -np.inf\n")
    ),
    control=ordinary,
)
def mask_hides_own_key(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    catches="the backward mask shows one key of the future",
    severity="major",
    story="Gradients flow into a key that the forward pass never used.",
    mutant=edits(_NEXT_KEY),
    also=[edits(_NEXT_KEY, UNBOUNDED)],
    control=ordinary,
)
def mask_sees_next_key(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    catches="the backward mask is aligned to the first key, the forward one to the last",
    severity="major",
    story="Training with T = S never shows it; training on a cached prefix does.",
    mutant=edit("position = top + S - T", "position = top"),
    also=[edits(("position = top + S - T", "position = top"), UNBOUNDED)],
    seen=BLIND,
    control=ordinary,
)
def mask_aligned_top_left(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((2, 6), (3, 8), (6, 2)):
        differentiates(submission, draw(Shape(T=T, S=S), rng, True), causal=True, tile=4)


@trap(
    catches="hidden scores are set to 0 instead of −inf, so hidden keys get weight exp(−lse)",
    severity="major",
    story="Kernels have this bug in tails: the weight must be zero, not the score.",
    mutant=edits(_ZEROED),
    also=[edits(_ZEROED, UNBOUNDED)],
    control=ordinary,
)
def mask_zeroes_scores(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


def low_logits(submission: Submission, rng: np.random.Generator) -> None:
    """Logits far below 0, every key visible."""
    for low in (-3e4, -3e9):
        differentiates(submission, with_logits(rng, [low] * 6, 6, False), tile=3)


@trap(
    catches="a finite mask that is larger than real logits gives hidden keys huge weights",
    severity="major",
    story="With all real logits at −3·10⁴, a mask of −10⁴ becomes exp(2·10⁴).",
    mutant=edits(mask("    if causal:\n        scores[_hidden(position, rows, cols)] = -1e4\n")),
    also=[edits(mask("    if causal:\n        scores[_hidden(position, rows, cols)] = -1e9\n"))],
    control=low_logits,
)
def mask_above_real_logits(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e4, -3e9):
        arguments = with_logits(rng, [low] * 6, 6, True)
        differentiates(submission, arguments, causal=True, tile=3)


@trap(
    catches="the loop over queries ends at the first hidden tile although later rows see the keys",
    severity="major",
    story="With keys in the outer and queries in the inner loop, the hidden tiles come first.",
    mutant=edit("continue  # these", "break  # these"),
    control=ordinary,
)
def break_instead_of_continue(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=12, S=12), rng, True), causal=True, tile=4)


_SKIPPED = "<= start:\n", "<= start + 1:\n"
_TILES = "    for start in range(0, stop, tile):\n"
_LATE = "        if causal and position + rows <= start + 1:\n            continue\n"


@trap(
    catches="a tile in which only the last row sees only the first key is skipped",
    severity="major",
    story="An off-by-one in the skip condition that aligned square problems never touch.",
    mutant=edit(*_SKIPPED),
    # Both passes go through the same tiles.
    also=[edits(_SKIPPED, (_TILES, _TILES + _LATE))],
    seen=BLIND,
    control=ordinary,
)
def diagonal_tile_skipped(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((8, 9), (7, 8), (8, 8)):
        for tile in (4, 1):
            differentiates(submission, draw(Shape(T=T, S=S), rng, True), causal=True, tile=tile)


def _square(submission: Submission, rng: np.random.Generator) -> None:
    """Causal, with as many keys as queries."""
    differentiates(submission, draw(Shape(T=8, S=8), rng, True), causal=True, tile=4)


def _unmasked(submission: Submission, rng: np.random.Generator) -> None:
    """The same size, every key visible."""
    differentiates(submission, draw(Shape(T=8, S=8), rng, False), tile=4)


@trap(
    catches="the backward pass skips tiles of queries as if the mask were aligned at the first "
    "key: with more keys than queries, queries that see a tile of keys are left out",
    severity="critical",
    story="The sweep over the queries starts at the number of the first key, which is the diagonal "
    "for T = S only; the mask itself has the offset S − T.",
    mutant=edit("position + rows.stop - top <= start", "rows.stop <= start"),
    seen=BLIND,
    control=_square,
)
def queries_skipped_without_offset(submission: Submission, rng: np.random.Generator) -> None:
    """Keys 4 to 7 have gradients from all queries, though not all keys beyond T lose theirs."""
    for T, S in ((8, 12), (9, 11)):
        differentiates(submission, draw(Shape(T=T, S=S), rng, True), causal=True, tile=4)


_WEIGHTS = "                dweights = dout[b, h, rows] @ v[b, g, cols].T\n"


@trap(
    catches="the backward pass does not allow the offset S − T, or where a tile of queries starts "
    "by it, to be negative: with more queries than keys its mask is aligned at the first key",
    severity="major",
    story="Queries take keys into account that they do not see.",
    mutant=edit("position = top + S - T", "position = top + max(S - T, 0)"),
    also=[
        edits(("position = top + S - T", "position = top + max(S - T, 0)"), UNBOUNDED),
        edit("position = top + S - T", "position = max(top + S - T, 0)"),
        edits(("position = top + S - T", "position = max(top + S - T, 0)"), UNBOUNDED),
    ],
    control=_square,
)
def backward_offset_never_negative(submission: Submission, rng: np.random.Generator) -> None:
    for tile in (3, 8):
        differentiates(submission, draw(Shape(T=8, S=5), rng, True), causal=True, tile=tile)


@trap(
    catches="the backward pass skips tiles of queries although causal=False",
    severity="major",
    story="The sweep over the queries starts at the diagonal without asking.",
    mutant=edit("if causal and position + rows.stop", "if position + rows.stop"),
    control=_square,
)
def queries_skipped_without_causal(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=8), rng, False), tile=4)


@trap(
    catches="the mask of a pass has the size of a whole tile, and does not fit where the last tile "
    "of keys or queries is smaller",
    severity="major",
    story="A slice of an array ends at its end, a range of positions does not.",
    mutant=edit("cols = slice(start, min(start + tile, S))", "cols = slice(start, start + tile)"),
    also=[
        edit("cols = slice(start, min(start + tile, stop))", "cols = slice(start, start + tile)"),
        edits(
            ("cols = slice(start, min(start + tile, S))", "cols = slice(start, start + tile)"),
            ("cols = slice(start, min(start + tile, stop))", "cols = slice(start, start + tile)"),
        ),
    ],
    control=_square,
)
def mask_of_a_whole_tile(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=6, S=6), rng, True)
    attends(submission, *arguments[1:4], causal=True, tile=4)
    differentiates(submission, arguments, causal=True, tile=4)


_AGAIN = "flash_attention(q, k, v, tile=tile)"


@trap(
    catches="the backward pass makes out again without the causal mask, alone or with lse",
    severity="major",
    story="`causal` is not handed on; without it nothing shows.",
    mutant=insert_after(CHECKED, f"    out, lse = {_AGAIN}\n"),
    # lse alone is a trap of its own: hidden keys in the normaliser.
    also=[insert_after(CHECKED, f"    out = {_AGAIN}[0]\n")],
    control=_unmasked,
)
def made_again_without_causal(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=8), rng, True), causal=True, tile=4)


@trap(
    catches="the first query that sees a tile of keys neither gets nor gives a gradient there",
    severity="major",
    story="For each tile of keys the loop over queries begins one query late.",
    mutant=insert_before(
        _WEIGHTS,
        "                if causal:\n"
        "                    weights[position + np.arange(rows.stop - top) == start] = 0\n",
    ),
    seen=BLIND,
    control=ordinary,
)
def first_seeing_query_skipped(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=8), rng, True), causal=True, tile=4)


# --- tiles and lengths ----------------------------------------------------------------------------


@trap(
    catches="keys behind the last whole tile get no gradient",
    severity="major",
    story="300 keys in tiles of 97 leave nine.",
    mutant=edit(BACKWARD_HEAD, BACKWARD_HEAD.replace("range(0, S, ", "range(0, S - S % tile, ")),
    control=ordinary,
)
def last_key_tile_dropped(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=3, S=300), rng, False), tile=97)


@trap(
    catches="queries behind the last whole tile neither get nor give gradients",
    severity="major",
    story="300 queries in tiles of 97 leave nine.",
    mutant=edit(ROW_LOOP, "            for top in range(0, T - T % tile, tile):\n"),
    control=ordinary,
)
def last_query_tile_dropped(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=300, S=3), rng, False), tile=97)


@trap(
    catches="a tile larger than the sequence is refused or answered wrongly",
    severity="major",
    story="The default tile of 64 is larger than a sequence of five tokens.",
    mutant=insert_after(
        CHECKED, "    if tile > max(k.shape[2], 1):\n        raise ValueError(tile)\n"
    ),
)
def tile_larger_than_sequence_refused(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        differentiates(submission, draw(Shape(T=5, S=5), rng, causal), causal=causal, tile=100)


@trap(
    catches="keys beyond the number of queries get no gradient",
    severity="major",
    story="Self-attention tests have T = S; cross-attention does not.",
    mutant=edit(BACKWARD_HEAD, BACKWARD_HEAD.replace("range(0, S, ", "range(0, min(S, T), ")),
    also=[
        edits(
            (BACKWARD_HEAD, BACKWARD_HEAD.replace("range(0, S, ", "range(0, min(S, T), ")),
            ("slice(start, min(start + tile, S))", "slice(start, min(start + tile, S, T))"),
        )
    ],
    seen=BLIND,
    control=ordinary,
)
def as_many_keys_as_queries(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=3, S=10), rng, False), tile=2)


# --- heads and batches ----------------------------------------------------------------------------


@trap(
    catches="the backward pass pairs query head h with kv head h mod G",
    severity="major",
    story="np.tile for np.repeat, in one of two places.",
    mutant=edit(BACKWARD_HEAD, _TILED_HEADS),
    also=[edits((BACKWARD_HEAD, _TILED_HEADS), UNBOUNDED)],
    seen=BLIND,
    control=ordinary,
)
def groups_by_tiling(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="the backward pass pairs query head h with kv head h // G",
    severity="major",
    story="H = 4, G = 2 hides it, because there H/G = G.",
    mutant=edit(BACKWARD_HEAD, _DIVIDED_HEADS),
    also=[edits((BACKWARD_HEAD, _DIVIDED_HEADS), UNBOUNDED)],
    control=ordinary,
)
def groups_by_wrong_divisor(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(H=6, G=3, T=4, S=4), rng, False), tile=3)


@trap(
    catches="all rows of a batch read the values of the first",
    severity="major",
    story="Tests with B = 1 cannot show it.",
    mutant=edit("dout[b, h, rows] @ v[b, g, cols].T", "dout[b, h, rows] @ v[0, g, cols].T"),
    control=ordinary,
)
def batch_shares_values(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(B=3, T=4, S=4), rng, True), causal=True)


# --- state ----------------------------------------------------------------------------------------


@trap(
    catches="the backward pass uses what its own last forward call left behind",
    severity="major",
    story="Fine in a script that calls one after the other; wrong with two layers, with activation "
    "checkpoints, or when out and lse come from another implementation.",
    mutant=edits(
        (_BUFFERS, _BUFFERS + "\n_SAVED = {}\n"),
        ("    return out, lse\n", '    _SAVED["lse"] = lse\n    return out, lse\n'),
        (CHECKED, CHECKED + '    lse = _SAVED["lse"]\n'),
    ),
    # Kept by shape, so that only a later call of the same shape does harm.
    also=[
        edits(
            (_BUFFERS, _BUFFERS + "\n_SAVED = {}\n"),
            (
                "    return out, lse\n",
                "    _SAVED[q.shape, k.shape, q.dtype, causal] = lse.copy()\n    return out, lse\n",
            ),
            (
                CHECKED,
                CHECKED + "    lse = _SAVED.get((q.shape, k.shape, q.dtype, causal), lse)\n",
            ),
        )
    ],
    seen=BLIND,
    keeps_state=True,
)
def needs_its_own_forward(submission: Submission, rng: np.random.Generator) -> None:
    first, second = (draw(Shape(T=6, S=6), rng, True) for _ in range(2))
    for arguments in (first, second):
        attends(submission, *arguments[1:4], causal=True)
    differentiates(submission, first, causal=True, tile=4)
    differentiates(submission.clean(), second, causal=True, tile=4)


@trap(
    catches="a buffer kept between calls still holds the last gradients",
    severity="major",
    story="A workspace is reused to save an allocation and is not cleared.",
    keeps_state=True,
    mutant=edits(
        (_BUFFERS, _BUFFERS + "\n_SPARE = {}\n"),
        (
            "    # The sum over keys of weight",
            "    dk = _SPARE.setdefault(dk.shape, dk)\n    # The sum over keys of weight",
        ),
    ),
)
def gradients_pile_up(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=5, S=5), rng, False)
    clean = submission.clean()
    for _ in range(3):
        differentiates(clean, arguments)


_KEPT = (_BUFFERS, _BUFFERS + "\n_KEPT = {}\n")
_ROW_SUMS = "    delta = (dout * out).sum(axis=-1)\n"
_RETURN_FORWARD = "    return out, lse\n"


def _alone(submission: Submission, rng: np.random.Generator) -> None:
    """One call of each pass, with nothing before it."""
    clean = submission.clean()
    arguments = draw(Shape(T=4, S=4), rng, False)
    differentiates(clean, arguments)
    attends(clean, *arguments[1:4], causal=False)


@trap(
    catches="what was computed from the caller's arrays is kept by their identity and used again, "
    "though the caller has filled them anew",
    severity="major",
    story="Row sums are kept under the id() of two arrays: a training loop that keeps its buffers "
    "gets the sums of the first step, and a new array at an old address those of another one.",
    keeps_state=True,
    mutant=edits(
        _KEPT,
        (CHECKED, CHECKED + "    key = id(dout), id(out)\n"),
        (
            _ROW_SUMS,
            _ROW_SUMS
            + "    if key not in _KEPT or _KEPT[key].shape != lse.shape:\n"
            + "        _KEPT[key] = delta\n"
            + "    delta = _KEPT[key]\n",
        ),
    ),
    also=[
        edits(
            _KEPT,
            (
                _RETURN_FORWARD,
                "    key = id(q), id(k), id(v), causal\n"
                "    if key not in _KEPT or _KEPT[key][0].shape != out.shape:\n"
                "        _KEPT[key] = out, lse\n"
                "    return _KEPT[key]\n",
            ),
        )
    ],
    seen=BLIND,
    control=_alone,
)
def kept_by_identity(submission: Submission, rng: np.random.Generator) -> None:
    clean, scope = submission.clean(), submission.scope
    calls = [saved_in_scope(scope, draw(Shape(T=4, S=4), rng, False), False) for _ in range(2)]
    inputs = [arguments[1:4] for arguments in calls]
    answers = clean.refilled("flash_attention_backward", *calls)
    for arguments, answer in zip(calls, answers, strict=True):
        agrees(answer, arguments, False, scope)
    for (q, k, v), answer in zip(inputs, clean.refilled("flash_attention", *inputs), strict=True):
        attention_agrees(answer, q, k, v, causal=False, scope=scope)
