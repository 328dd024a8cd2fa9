"""Bugs in the handling of inputs: refusals, state, memory."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import (
    DTYPES,
    LONG,
    REFUSAL,
    Rng,
    ask,
    check,
    logits_of,
    overlapping,
)
from trapline.challenges.fused_softmax_topk.solution_lines import FRESH, PROBS, TILE

# Parts of the gold solution that several mutants edit.
_TILE_DEF = "TILE = 8192"
_CHECKED = "    _check(logits, k)\n"
_RETURN = "    return probs, indices\n"
_ALL_MASKED = "    if largest == -np.inf:\n"
_TILE_MAX = "tile_max = np.max(tile)"
_NOT_FINITE = "if not tile_max < np.inf:"

#: Bytes by which allocators may differ from run to run; the temporaries in question are larger.
GROWTH = 2_000_000

# --- what is refused ------------------------------------------------------------------------------


@trap(
    catches="NaN is ignored, or found only in some positions",
    severity="critical",
    story="NaN compares false with everything: heaps skip it, and a broken model goes unnoticed.",
    mutant=edit(_TILE_MAX, "tile_max = np.fmax.reduce(tile)"),
)
def nan_passes(submission: Submission, rng: Rng) -> None:
    for place in (0, 1, LONG // 2, LONG - 1):
        logits = logits_of(rng, (2, LONG), np.float32)
        logits[1, place] = np.nan
        expect.raises(ValueError, submission.softmax_topk, logits, 3)


@trap(
    catches="+inf answered with NaN or with probability 1",
    severity="major",
    story="An overflow in an earlier layer then looks like a very confident model.",
    mutant=edit(_NOT_FINITE, "if np.isnan(tile_max):"),
)
def plus_infinity_passes(submission: Submission, rng: Rng) -> None:
    for place in (0, LONG - 1):
        logits = logits_of(rng, (2, LONG), np.float32)
        logits[1, place] = np.inf
        expect.raises(ValueError, submission.softmax_topk, logits, 3)


@trap(
    catches="a row in which every logit is −inf is answered with NaN, zeros or a uniform "
    "distribution",
    severity="major",
    story="A grammar without a legal continuation must be an error, not token 0.",
    mutant=edit(_ALL_MASKED, "    if False:\n"),
)
def all_masked_row_passes(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (3, 12), dtype)
        logits[2] = -np.inf
        expect.raises(ValueError, submission.softmax_topk, logits, 2)


@trap(
    catches="k below 1 or above V silently corrected",
    severity="major",
    story="k = 0 can mean 'off' to one caller and 'nothing' to another.",
    mutant=edits(
        ("if not 1 <= k <= logits.shape[1]:", "if k is None:"),
        (_CHECKED, _CHECKED + "    k = min(max(k, 1), logits.shape[1])\n"),
    ),
)
def k_clamped(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 6), np.float32)
    for k in (0, -1, 7, 600):
        expect.raises(ValueError, submission.softmax_topk, logits, k)
    expect.raises(ValueError, submission.softmax_topk, logits[:0], 7)


@trap(
    catches="integer or complex logits are computed instead of refused",
    severity="minor",
    story="Quantised codes are then ranked as if they were logits.",
    mutant=edit("not in (np.float16, np.float32, np.float64):", "== object:"),
)
def integers_accepted(submission: Submission, rng: Rng) -> None:
    for dtype in (np.int32, np.complex64):
        logits = rng.integers(0, 9, (2, 6)).astype(dtype)
        expect.raises(REFUSAL, submission.softmax_topk, logits, 2)


@trap(
    catches="logits of rank 1 or 3 accepted",
    severity="minor",
    story="With (B, T, V) logits, T is taken for the vocabulary.",
    mutant=edits(
        ("if logits.ndim != 2:", "if logits.ndim == 0:"),
        (_CHECKED, _CHECKED + "    logits = logits.reshape(-1, logits.shape[-1])\n"),
    ),
)
def rank_ignored(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (3, 6))
    for other in (logits[0], logits[None]):
        expect.raises(REFUSAL, submission.softmax_topk, other, 2)


# --- inputs, state, memory ------------------------------------------------------------------------


@trap(
    catches="memory is read in its own order whatever the strides",
    severity="critical",
    story="Logits of the last positions are a strided slice; the wrong rows are read.",
    mutant=insert_after(_CHECKED, "    logits = logits.ravel(order='K').reshape(logits.shape)\n"),
)
def strided_logits(submission: Submission, rng: Rng) -> None:
    wide = logits_of(rng, (12, 40), np.float32)
    for view in (wide[::3], wide[:, ::2], wide[::-1, ::-1], wide.T, wide[4:5].repeat(3, 0)):
        ask(submission, view, 5)
    ask(submission, np.broadcast_to(wide[:1], (5, 40)), 5)
    ask(submission, np.broadcast_to(wide[:, :1], (12, 9)), 5)


@trap(
    catches="the maximum subtracted, or winners masked, in the caller's array",
    severity="critical",
    story="Repeated argmax writes −inf into the logits, which the sampler still needs.",
    mutant=edit(
        TILE,
        "tile = logits[start : start + TILE]\n"
        "        tile -= tile.max() if np.isfinite(tile.max()) else 0",
    ),
)
def logits_modified(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (3, 30), dtype)
        _, after = submission.observe("softmax_topk", logits, 4)
        expect.equal(after[0], logits, "logits after the call")


@trap(
    catches="an answer kept from an earlier call of the same shape",
    severity="critical",
    story="A cache keyed by shape and by a few of the values.",
    mutant=edits(
        (_TILE_DEF, _TILE_DEF + "\nSEEN = {}"),
        (
            _CHECKED,
            _CHECKED + "    key = logits.shape, k, logits[:1, :1].tobytes()\n"
            "    if key in SEEN:\n"
            "        return SEEN[key]\n",
        ),
        (_RETURN, "    SEEN[key] = probs, indices\n    return probs, indices\n"),
    ),
)
def answer_remembered(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 30), np.float32)
    ask(submission, logits, 4)
    changed = logits.copy()
    changed[1, 17] += 25.0
    ask(submission, changed, 4)
    ask(submission, logits, 4)


@trap(
    catches="an empty batch raises or comes back with another shape",
    severity="major",
    story="The last shard of a batch can be empty.",
    mutant=edit(_RETURN, "    return np.stack(list(probs)), np.stack(list(indices))\n"),
)
def no_rows_crash(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (0, 11), np.float16), 4)


@trap(
    catches="an N × V temporary, which the fusion is meant to avoid",
    severity="critical",
    story="Half of the graded answers computed the whole softmax first, in one of their passes.",
    mutant=insert_after(_CHECKED, "    logits = logits - np.zeros((), logits.dtype)\n"),
)
def matrix_materialised(submission: Submission, rng: Rng) -> None:
    """Half a million logits, then four million: even a mask of one byte each shows."""
    _expect_no_growth(submission, overlapping(rng, 256, 2048), overlapping(rng, 1024, 4096))


@trap(
    catches="a whole row copied, widened or sorted at once",
    severity="major",
    story="Memory O(V) a row is O(V · rows in flight) on a GPU.",
    mutant=edit(_TILE_DEF, "TILE = 1 << 30"),
)
def tile_grows_with_v(submission: Submission, rng: Rng) -> None:
    """A row of a million equal logits, which take four bytes to hold."""
    row = np.broadcast_to(np.float32(rng.integers(-3, 4)), (1, 1 << 20))
    _expect_no_growth(submission, row[:, : 1 << 18], row)


@trap(
    catches="float16 logits cast to float32 all at once, which is an N × V temporary of its own",
    severity="major",
    story="The float32 path is fused, and the float16 path begins with a cast of the whole matrix.",
    mutant=insert_after(
        PROBS, "\n    logits = logits.astype(np.promote_types(logits.dtype, 'f4'))"
    ),
)
def half_matrix_widened(submission: Submission, rng: Rng) -> None:
    half = np.float16
    small, large = overlapping(rng, 256, 2048, half), overlapping(rng, 512, 4096, half)
    _expect_no_growth(submission, small, large)


@trap(
    catches="candidates taken for complete before k of them were seen: wrong once k exceeds a tile",
    severity="major",
    story="The first tile is assumed to fill the list; a larger k gives a short answer.",
    mutant=edit(FRESH, FRESH.replace("if best.size == k", "if best.size")),
)
def k_above_a_tile(submission: Submission, rng: Rng) -> None:
    falling = -np.sort(-logits_of(rng, (1, LONG), np.float32))
    ask(submission, falling, LONG // 2)


@trap(
    catches="a NaN goes unnoticed because all other logits of its tile are −inf and the tile is "
    "skipped",
    severity="major",
    story="Tiles without a finite logit are skipped before they are checked for NaN.",
    mutant=edits(
        (_TILE_MAX, "tile_max = np.fmax.reduce(tile)"),
        (_NOT_FINITE, "if tile_max == np.inf:"),
        (_ALL_MASKED, "    if np.isnan(total) or largest == -np.inf:\n"),
    ),
)
def nan_among_masked(submission: Submission, rng: Rng) -> None:
    for start, place in ((LONG - 30, 7), (LONG - 30, LONG // 4), (0, LONG // 2)):
        logits = np.full((2, LONG), -np.inf, np.float32)
        logits[:, start : start + 30] = logits_of(rng, (2, 30), np.float32)
        logits[1, place] = np.nan
        expect.raises(ValueError, submission.softmax_topk, logits, 3)


def _expect_no_growth(submission: Submission, small: np.ndarray, large: np.ndarray) -> None:
    """Peak memory by the kernel's count, in a process that has done nothing else before.

    The small problem pays for the tile, whatever its size; the large one may not need more.
    """
    fresh = submission.fresh()
    ask(fresh, small, 2)
    before = fresh.session.peak_bytes()
    answer = fresh.softmax_topk(large, 2)
    extra = fresh.session.peak_bytes() - before
    expect.that(extra <= GROWTH, f"peak memory rose by {extra} bytes with the size of the input")
    check(answer, large, 2)
