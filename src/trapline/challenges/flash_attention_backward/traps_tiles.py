"""Bugs at the bounds of the forward pass's tiles, and where keys are hidden.

As in `traps_merging`, mutants come from the forward challenge where they fit.
"""

import numpy as np

from trapline.arena.judge.traps import edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.situations import (
    BLIND_FORWARD,
    both_passes,
    one_key,
    ordinary,
    with_logits,
)
from trapline.challenges.flash_attention_backward.solution_lines import (
    FORWARD_MASK,
    RECOMPUTE,
    in_both,
    mask,
    with_saved,
)
from trapline.challenges.flash_attention_forward import traps_causal, traps_numbers, traps_scale
from trapline.challenges.flash_attention_forward import traps_tiles as forward_tiles
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.solution_lines import SUM, WEIGHTED

# Parts of the gold solution that several mutants edit.
_SCORES = "        scores = q @ k[cols].T\n"
_MASK = "scores[_hidden(position, rows, cols)] = -np.inf"
_WHERE_MASKED = "if causal and cols.stop > position + 1:"


def _two_tiles(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=8).draw(rng), tile=4)


def _short_last_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), tile=4)


def _causal(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), causal=True, tile=8)


# --- bounds of tiles ------------------------------------------------------------------------------


@trap(
    catches="values behind the last whole tile are missing in the output, though their weights are "
    "in the sum",
    severity="critical",
    story="A second sweep over the keys has another bound than the first: lse is right, out is too "
    "small.",
    mutant=forward_tiles.last_values_dropped.mutant,
    also=[in_both(forward_tiles.last_values_dropped.mutant)],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def last_values_dropped(submission: Submission, rng: np.random.Generator) -> None:
    _short_last_tile(submission, rng)


@trap(
    catches="the forward pass does not read the last key of every whole tile",
    severity="major",
    story="An end that is one too small: start + tile − 1.",
    mutant=forward_tiles.last_key_of_tiles_dropped.mutant,
    also=[in_both(forward_tiles.last_key_of_tiles_dropped.mutant)],
    control=one_key,
)
def last_key_of_tiles_dropped(submission: Submission, rng: np.random.Generator) -> None:
    _two_tiles(submission, rng)


@trap(
    catches="a tile of the forward pass reads one key too many: the first of the next tile counts "
    "twice",
    severity="major",
    story="An end that is one too large; the last tile is cut at the last key and hides it.",
    mutant=forward_tiles.tiles_overlap_by_one.mutant,
    also=[in_both(forward_tiles.tiles_overlap_by_one.mutant)],
    control=ordinary,
)
def tiles_overlap_by_one(submission: Submission, rng: np.random.Generator) -> None:
    _two_tiles(submission, rng)


@trap(
    catches="the forward pass moves its last tile back to be whole, and shared keys count twice",
    severity="major",
    story="Moving the last tile back is right for rows that are written twice, not for keys that "
    "are summed.",
    mutant=forward_tiles.last_tile_moved_back.mutant,
    also=[in_both(forward_tiles.last_tile_moved_back.mutant)],
    control=ordinary,
)
def last_tile_moved_back(submission: Submission, rng: np.random.Generator) -> None:
    _short_last_tile(submission, rng)


@trap(
    catches="the forward pass skips the first tile of keys",
    severity="major",
    story="The first tile initialises the state and the loop starts at the second, but the state "
    "is not set.",
    mutant=forward_tiles.first_key_tile_skipped.mutant,
    also=[in_both(forward_tiles.first_key_tile_skipped.mutant)],
    control=one_key,
)
def first_key_tile_skipped(submission: Submission, rng: np.random.Generator) -> None:
    _two_tiles(submission, rng)


# --- what is rescaled, dropped and saved ----------------------------------------------------------


@trap(
    catches="the correction is left out while the maximum rises by less than 1e-6",
    severity="minor",
    story="Skipping needless rescaling is a real speed-up when the old maximum is kept; with the "
    "new one every skipped step is an error far above float64's rounding.",
    mutant=traps_numbers.small_rise_not_rescaled.mutant,
    also=[in_both(traps_numbers.small_rise_not_rescaled.mutant)],
    control=ordinary,
)
def small_rise_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [5e-7 * s for s in range(12)], 3, False)
    attends(submission, q, k, v, tile=2)


@trap(
    catches="the forward pass keeps the old maximum while the new one is not much larger, and exp "
    "of the difference or the sum of such weights overflows",
    severity="major",
    story="Rescaling only after a large rise saves work, but the bound must fit the dtype: "
    "exp(100) is infinite in float32, and eight times exp(87.5), too.",
    mutant=traps_numbers.kept_maximum_overflows.mutant,
    also=[in_both(traps_numbers.kept_maximum_overflows.mutant)],
    seen=BLIND_FORWARD,
    control=traps_numbers.rises_within_range,
)
def kept_maximum_overflows(submission: Submission, rng: np.random.Generator) -> None:
    traps_numbers.kept_maximum_overflows.run(submission, rng)


@trap(
    catches="the forward pass sets weights below 1e-8 to 0, also in float64",
    severity="minor",
    story="The threshold is below float32's rounding error; in float64 it costs half of the "
    "digits.",
    mutant=traps_numbers.small_weights_dropped.mutant,
    also=[in_both(traps_numbers.small_weights_dropped.mutant)],
    control=ordinary,
)
def forward_small_weights_dropped(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [0.0] + [-19.0] * 6, 3, False)
    attends(submission, q, k, v, tile=8)


@trap(
    catches="lse combines the total sum with the maximum of the last tile only",
    severity="major",
    story="A local variable of the loop is used after it in place of the running maximum.",
    mutant=traps_scale.lse_with_last_tile_maximum.mutant,
    also=[in_both(traps_scale.lse_with_last_tile_maximum.mutant)],
    control=ordinary,
)
def lse_with_last_tile_maximum(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [6.0, 5.0, 0.0, -1.0], 3, False)
    attends(submission, q, k, v, tile=2)


# --- what hidden keys still do --------------------------------------------------------------------

_HIDDEN_ZERO = edits((FORWARD_MASK, FORWARD_MASK.replace("-np.inf", "0")))
_HIDDEN_SUMMED = edits(
    (FORWARD_MASK, FORWARD_MASK.replace(_MASK, "hidden = _hidden(position, rows, cols)")),
    (SUM, f"{SUM}\n        {_WHERE_MASKED}\n            weights[hidden] = 0"),
)
_HIDDEN_SHOWN = edits(
    (FORWARD_MASK, FORWARD_MASK.replace(_MASK, f"shown = scores.copy()\n            {_MASK}")),
    (
        WEIGHTED,
        f"{_WHERE_MASKED}\n"
        "            weights = np.exp(shown - origin[:, None])\n"
        f"        {WEIGHTED}",
    ),
)
_HIDDEN_MAXIMUM = edits(
    (_SCORES, f"{_SCORES}        largest = scores.max(axis=1)\n"),
    ("np.maximum(peak, scores.max(axis=1))", "np.maximum(peak, largest)"),
)


@trap(
    catches="the forward mask is applied to one key tile for each tile of queries, where the "
    "diagonal crosses two",
    severity="critical",
    story="Where S − T is a multiple of the tile, as in square problems, the diagonal stays in one "
    "tile: the last one.",
    mutant=traps_causal.mask_in_one_key_tile.mutant,
    also=[in_both(traps_causal.mask_in_one_key_tile.mutant)],
    seen=BLIND_FORWARD,
    control=_causal,
)
def mask_in_one_key_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=14).draw(rng), causal=True, tile=4)


_ONE_PAST = (_WHERE_MASKED, _WHERE_MASKED.replace("+ 1", "+ 2"))
_BACKWARD_ONE_PAST = mask(f"    {_ONE_PAST[1]}\n        {_MASK}\n")


def causal_square(submission: Submission, rng: np.random.Generator) -> None:
    """Tiles reach no key past what their first query sees, or several."""
    both_passes(submission, rng, 8, 4, causal=True)


@trap(
    catches="a tile that reaches exactly one key past what its first query sees is left unmasked",
    severity="critical",
    story="Whether a tile needs the mask is decided by comparing the index of its last key with a "
    "count of visible keys. In tiles of three or more, a square problem does not show it.",
    mutant=edits(_ONE_PAST),
    also=[
        edits(_ONE_PAST, RECOMPUTE),
        *with_saved(_ONE_PAST, _BACKWARD_ONE_PAST),
        *with_saved(_BACKWARD_ONE_PAST),
    ],
    seen=BLIND_FORWARD,
    control=causal_square,
)
def one_key_past_unmasked(submission: Submission, rng: np.random.Generator) -> None:
    """Two keys in a tile of which the first query sees the first."""
    for length, tile in ((2, 64), (6, 2)):
        both_passes(submission, rng, length, tile, causal=True)


@trap(
    catches="the forward pass sets hidden scores to 0 instead of −inf",
    severity="major",
    story="Multiplying scores by a mask of zeros and ones hides nothing: exp(0) is 1.",
    mutant=_HIDDEN_ZERO,
    also=[in_both(_HIDDEN_ZERO)],
    control=ordinary,
)
def hidden_scores_zero(submission: Submission, rng: np.random.Generator) -> None:
    _causal(submission, rng)


@trap(
    catches="hidden keys get weight 0 in the output, but stay in the sum",
    severity="major",
    story="The weights are masked after they were summed.",
    mutant=_HIDDEN_SUMMED,
    also=[in_both(_HIDDEN_SUMMED)],
    control=ordinary,
)
def hidden_keys_in_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    _causal(submission, rng)


@trap(
    catches="hidden keys are left out of the sum, but keep their weight in the output",
    severity="major",
    story="A second sweep over the keys forms the output and forgets the mask.",
    mutant=_HIDDEN_SHOWN,
    also=[in_both(_HIDDEN_SHOWN)],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def hidden_keys_in_the_output(submission: Submission, rng: np.random.Generator) -> None:
    _causal(submission, rng)


@trap(
    catches="the maximum is taken before the mask, and a large hidden score makes a row underflow",
    severity="major",
    story="Right while hidden scores are not much larger than visible ones.",
    mutant=_HIDDEN_MAXIMUM,
    also=[in_both(_HIDDEN_MAXIMUM)],
    control=_causal,
)
def maximum_of_hidden_keys(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [0.0, 0.5, -0.5, 2000.0], 4, True)
    attends(submission, q, k, v, causal=True, tile=4)
