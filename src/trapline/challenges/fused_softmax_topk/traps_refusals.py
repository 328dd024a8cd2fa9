"""Bad input that is answered."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import LONG, REFUSAL, Array, Rng, logits_of
from trapline.challenges.fused_softmax_topk.situations import WRITTEN_BLIND, one_tile
from trapline.challenges.fused_softmax_topk.solution_lines import (
    ALL_MASKED,
    CALL,
    CHECKED,
    KEPT,
    MERGE,
)

# Parts of the gold solution that several mutants edit.
_TILE_MAX = "tile_max = np.max(tile)"
_NOT_FINITE = "if not tile_max < np.inf:"
_K = "if not 1 <= k <= logits.shape[1]:"
_FLOATS = "not in (np.float16, np.float32, np.float64):"
_RANK = "if logits.ndim != 2:"
_FLATTEN = "    logits = logits.reshape(-1, logits.shape[-1])\n"


def _with(rng: Rng, place: int, value: float, length: int = LONG) -> Array:
    logits = logits_of(rng, (2, length))
    logits[1, place] = value
    return logits


@trap(
    catches="NaN is not refused",
    severity="major",
    story="NaN compares false with everything: heaps skip it, and a broken model goes unnoticed.",
    mutant=edits(
        (_TILE_MAX, "tile_max = np.fmax.reduce(tile)"),
        (_NOT_FINITE, "if tile_max == np.inf:"),
        (KEPT, "kept = ~(values < cut)"),
    ),
    dimension="robustness",
    seen=WRITTEN_BLIND,
)
def nan_passes(submission: Submission, rng: Rng) -> None:
    expect.raises(ValueError, submission.softmax_topk, _with(rng, 7, np.nan, 20), 3)


@trap(
    catches="a NaN is lost in a maximum: beside other logits of its tile unless it comes first, "
    "or where the maxima of tiles are merged",
    severity="major",
    story="max() of a list keeps a NaN that comes first and drops one that comes later; fmax drops "
    "any.",
    mutant=edit(_TILE_MAX, "tile_max = tile[0] if np.isnan(tile[0]) else np.fmax.reduce(tile)"),
    also=[
        edits(
            (_NOT_FINITE, "if tile_max == np.inf:"),
            ("new = max(largest, tile_max)", "new = np.fmax(largest, tile_max)"),
        ),
    ],
    seen=WRITTEN_BLIND,
    dimension="robustness",
    control=one_tile,
)
def later_nan_passes(submission: Submission, rng: Rng) -> None:
    for place in (1, LONG // 2, LONG - 1):
        expect.raises(ValueError, submission.softmax_topk, _with(rng, place, np.nan), 3)


@trap(
    catches="NaN and +inf are looked for in the first tile of a row only",
    severity="major",
    story="A generator checks what it reads first; vocabularies are longer than a tile.",
    mutant=edit(_NOT_FINITE, "if not tile_max < np.inf and largest == -np.inf:"),
    dimension="robustness",
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def later_tiles_unchecked(submission: Submission, rng: Rng) -> None:
    for value in (np.nan, np.inf):
        expect.raises(ValueError, submission.softmax_topk, _with(rng, LONG - 1, value), 3)


@trap(
    catches="a NaN goes unnoticed because its tile is skipped: all its other logits are −inf, or "
    "none seems to be among the winners",
    severity="major",
    dimension="robustness",
    story="Tiles without a finite logit, or whose maximum is not above the k-th best (a comparison "
    "that NaN fails), are skipped before they are checked.",
    mutant=edits(
        (_TILE_MAX, "tile_max = np.fmax.reduce(tile)"),
        (_NOT_FINITE, "if tile_max == np.inf:"),
        (ALL_MASKED, "    if np.isnan(total) or largest == -np.inf:\n"),
    ),
    also=[
        edits(
            (_NOT_FINITE, "if tile_max == np.inf:"),
            (MERGE, f"if not np.isnan(np.max(tile)):\n            {MERGE}"),
            (
                ALL_MASKED,
                "    if np.isnan(total) and np.count_nonzero(logits > best[-1]) >= k:\n"
                '        raise IndexError("more winners than places")\n' + ALL_MASKED,
            ),
        )
    ],
    seen=WRITTEN_BLIND,
)
def nan_among_masked(submission: Submission, rng: Rng) -> None:
    for start, place in ((LONG - 30, 7), (LONG - 30, LONG // 4), (0, LONG // 2)):
        logits = np.full((2, LONG), -np.inf, np.float32)
        logits[:, start : start + 30] = logits_of(rng, (2, 30), np.float32)
        logits[1, place] = np.nan
        expect.raises(ValueError, submission.softmax_topk, logits, 3)


@trap(
    catches="+inf answered with NaN or with probability 1",
    severity="major",
    story="An overflow in an earlier layer then looks like a very confident model.",
    mutant=edit(_NOT_FINITE, "if np.isnan(tile_max):"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def plus_infinity_passes(submission: Submission, rng: Rng) -> None:
    expect.raises(ValueError, submission.softmax_topk, _with(rng, 7, np.inf, 20), 3)


@trap(
    catches="neither NaN nor +inf is refused",
    severity="major",
    story="The values of the logits are not looked at.",
    mutant=edits(
        (_TILE_MAX, "tile_max = np.fmax.reduce(tile)"),
        (_NOT_FINITE, "if tile_max is None:"),
        (KEPT, "kept = ~(values < cut)"),
    ),
    dimension="robustness",
)
def values_unchecked(submission: Submission, rng: Rng) -> None:
    expect.raises(ValueError, submission.softmax_topk, _with(rng, 7, np.nan, 20), 3)


@trap(
    catches="a row in which every logit is −inf is answered with NaN, zeros or a uniform "
    "distribution",
    severity="major",
    story="A grammar without a legal continuation must be an error, not token 0.",
    mutant=edit(ALL_MASKED, "    if False:\n"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def all_masked_row_passes(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    expect.raises(ValueError, submission.softmax_topk, np.full((1, 12), -np.inf), 2)


@trap(
    catches="a row that is all −inf is refused only if all other rows are, too",
    severity="minor",
    story="`all` over a block of rows where `any` belongs.",
    mutant=edit(
        CALL,
        "try:\n"
        f"            {CALL}\n"
        "        except ValueError:\n"
        "            if not np.all(np.isneginf(logits[row])) or np.all(np.isneginf(logits)):\n"
        "                raise\n"
        "            probs[row], indices[row] = np.nan, np.arange(k)",
    ),
    dimension="robustness",
    seen=WRITTEN_BLIND,
)
def masked_row_among_others(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (3, 12))
    logits[2] = -np.inf
    expect.raises(ValueError, submission.softmax_topk, logits, 2)


@trap(
    catches="k below 1 or above V silently corrected",
    severity="minor",
    story="k = 0 can mean 'off' to one caller and 'nothing' to another.",
    mutant=edits(
        (_K, "if k is None:"),
        (CHECKED, CHECKED + "    k = min(max(k, 1), logits.shape[1])\n"),
    ),
    dimension="robustness",
)
def k_clamped(submission: Submission, rng: Rng) -> None:
    expect.raises(ValueError, submission.softmax_topk, logits_of(rng, (2, 6)), 7)


@trap(
    catches="k above V is accepted",
    severity="minor",
    story="A vocabulary smaller than the usual k gives a short answer.",
    mutant=edits((_K, "if k < 1:"), (CHECKED, CHECKED + "    k = min(k, logits.shape[1])\n")),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def k_above_v_accepted(submission: Submission, rng: Rng) -> None:
    expect.raises(ValueError, submission.softmax_topk, logits_of(rng, (2, 6)), 7)


@trap(
    catches="a matrix without rows is answered before k is checked",
    severity="minor",
    story="The shortcut is added last and placed first.",
    mutant=edit(
        CHECKED,
        "    if len(logits) == 0:\n"
        "        shape = (0, max(k, 0))\n"
        "        return np.empty(shape, logits.dtype), np.empty(shape, np.int64)\n" + CHECKED,
    ),
    dimension="robustness",
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def no_rows_unchecked(submission: Submission, rng: Rng) -> None:
    for k in (0, 7):
        expect.raises(ValueError, submission.softmax_topk, logits_of(rng, (0, 6)), k)


@trap(
    catches="k = 0 is accepted",
    severity="minor",
    story="The answer has no columns, and the caller takes the first.",
    mutant=edits(
        (_K, "if not 0 <= k <= logits.shape[1]:"),
        (
            CHECKED,
            CHECKED + "    if k == 0:\n"
            "        return logits[:, :0].copy(), np.empty((len(logits), 0), np.int64)\n",
        ),
    ),
    dimension="robustness",
)
def k_of_0_accepted(submission: Submission, rng: Rng) -> None:
    expect.raises(ValueError, submission.softmax_topk, logits_of(rng, (2, 6)), 0)


@trap(
    catches="a negative k is accepted",
    severity="minor",
    story="A slice [:-1] silently means all but the last.",
    mutant=edits(
        (_K, "if k == 0 or k > logits.shape[1]:"),
        (CHECKED, CHECKED + "    k = max(k, 1)\n"),
    ),
    dimension="robustness",
)
def negative_k_accepted(submission: Submission, rng: Rng) -> None:
    expect.raises(ValueError, submission.softmax_topk, logits_of(rng, (2, 6)), -1)


@trap(
    catches="integer or complex logits are computed instead of refused",
    severity="minor",
    story="Quantised codes are then ranked as if they were logits.",
    mutant=edit(_FLOATS, "== object:"),
    dimension="robustness",
)
def dtypes_unchecked(submission: Submission, rng: Rng) -> None:
    logits = rng.integers(0, 9, (2, 6))
    for dtype in (np.complex64, np.int32):
        expect.raises(REFUSAL, submission.softmax_topk, logits.astype(dtype), 2)


@trap(
    catches="integer logits are computed instead of refused",
    severity="minor",
    story="Quantised codes are then ranked as if they were logits.",
    mutant=edit(f"logits.dtype {_FLOATS}", "logits.dtype.kind not in 'fiu':"),
    dimension="robustness",
)
def integers_accepted(submission: Submission, rng: Rng) -> None:
    logits = rng.integers(0, 9, (2, 6)).astype(np.int32)
    expect.raises(REFUSAL, submission.softmax_topk, logits, 2)


@trap(
    catches="complex logits are computed instead of refused",
    severity="minor",
    story="The imaginary part is dropped on the way.",
    mutant=edit(f"logits.dtype {_FLOATS}", "logits.dtype.kind not in 'fc':"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def complex_accepted(submission: Submission, rng: Rng) -> None:
    logits = rng.integers(0, 9, (2, 6)).astype(np.complex64)
    expect.raises(REFUSAL, submission.softmax_topk, logits, 2)


@trap(
    catches="logits of rank 1 or 3 accepted",
    severity="minor",
    story="With (B, T, V) logits, T is taken for the vocabulary.",
    mutant=edits((_RANK, "if logits.ndim == 0:"), (CHECKED, CHECKED + _FLATTEN)),
    dimension="robustness",
)
def rank_ignored(submission: Submission, rng: Rng) -> None:
    expect.raises(REFUSAL, submission.softmax_topk, logits_of(rng, (3, 6))[0], 2)


@trap(
    catches="logits of rank 3 accepted",
    severity="minor",
    story="Leading axes are flattened, and the answer has another shape than the caller expects.",
    mutant=edits((_RANK, "if logits.ndim < 2:"), (CHECKED, CHECKED + _FLATTEN)),
    dimension="robustness",
)
def rank_3_accepted(submission: Submission, rng: Rng) -> None:
    expect.raises(REFUSAL, submission.softmax_topk, logits_of(rng, (3, 6))[None], 2)
