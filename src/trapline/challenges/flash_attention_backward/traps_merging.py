"""Bugs of the forward pass where tiles of keys are merged, as in the forward challenge.

Both challenges have the same forward pass, so the mutants are those of the forward challenge. A
second form makes out and lse again in the backward pass, so that the bug is in both.
"""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.situations import (
    BLIND_FORWARD,
    one_key,
    ordinary,
    with_logits,
)
from trapline.challenges.flash_attention_backward.solution_lines import CHECKED, in_both
from trapline.challenges.flash_attention_forward import traps_edges, traps_softmax, traps_tiles
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.solution_lines import WEIGHTED

# Parts of the gold solution that several mutants edit.
_CHECKED_FORWARD = (
    "    _check(q, k, v, tile)\n    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]\n    out"
)
_SCORES = "        scores = q @ k[cols].T\n"


def two_tiles(submission: Submission, rng: np.random.Generator, logits: list[float]) -> None:
    """Eight keys with these scores in tiles of four."""
    _, q, k, v, _, _ = with_logits(rng, logits, 4, False)
    attends(submission, q, k, v, tile=4)


# --- rescaling ------------------------------------------------------------------------------------


@trap(
    catches="neither the sum nor the output is rescaled when the maximum rises",
    severity="critical",
    story="Each tile is summed as if its maximum were the final one.",
    mutant=traps_softmax.nothing_rescaled.mutant,
    also=[in_both(traps_softmax.nothing_rescaled.mutant)],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def nothing_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng, [-1.0] * 4 + [1.0] * 4)


@trap(
    catches="the weights of a new tile refer to its own maximum and are added without a correction",
    severity="major",
    story="The old part is corrected to the new maximum, the new part is not.",
    mutant=traps_tiles.new_tile_not_rescaled.mutant,
    also=[in_both(traps_tiles.new_tile_not_rescaled.mutant)],
    control=ordinary,
)
def new_tile_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng, [0.5] * 4 + [-0.5] * 4)


@trap(
    catches="the sum of a new tile is added without its factor exp(its maximum − the common one), "
    "while its weighted values have it",
    severity="major",
    story="As if a new tile always held the greatest score so far.",
    mutant=traps_tiles.new_sum_not_rescaled.mutant,
    also=[in_both(traps_tiles.new_sum_not_rescaled.mutant)],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def new_sum_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng, [0.5] * 4 + [-0.5] * 4)


@trap(
    catches="a running mean is rescaled as if it were a sum, by the change of the maximum alone",
    severity="critical",
    story="A mean that is divided by its sum in every tile has to be rescaled by the old sum over "
    "the new one, too.",
    mutant=traps_edges.mean_rescaled_as_a_sum.mutant,
    also=[in_both(traps_edges.mean_rescaled_as_a_sum.mutant)],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def mean_rescaled_as_a_sum(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=8).draw(rng), tile=4)


# --- lse ------------------------------------------------------------------------------------------


@trap(
    catches="lse of the forward pass is the logarithm of a sum that exp(maximum) has multiplied "
    "back: it overflows for large scores and is −inf for low ones, while out is right",
    severity="major",
    story="log(total · exp(peak)) leaves the domain that the maximum was subtracted for; "
    "peak + log(total) does not.",
    mutant=traps_softmax.lse_leaves_the_log_domain.mutant,
    also=[
        in_both(traps_softmax.lse_leaves_the_log_domain.mutant),
        *traps_softmax.lse_leaves_the_log_domain.also,
    ],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def forward_lse_leaves_the_log_domain(submission: Submission, rng: np.random.Generator) -> None:
    for level in (2000.0, -2000.0):
        two_tiles(submission, rng, [level + one for one in (3.0, 1.0, 2.0, 3.0) * 2])


# --- merging --------------------------------------------------------------------------------------


@trap(
    catches="what was summed so far is merged by its maximum alone: its sum of exponentials is "
    "forgotten",
    severity="critical",
    story="A partial result is merged as if it were one key; with one tile there is nothing to "
    "merge.",
    mutant=traps_tiles.merge_forgets_the_sum.mutant,
    also=[in_both(traps_tiles.merge_forgets_the_sum.mutant)],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def merge_forgets_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng, [-0.5] * 4 + [0.5] * 4)


@trap(
    catches="the normalised results of two tiles are averaged by their maxima alone, without sums",
    severity="critical",
    story="A partial result is a mean: its weight is its whole sum of exponentials.",
    mutant=traps_tiles.merged_by_maxima.mutant,
    also=[in_both(traps_tiles.merged_by_maxima.mutant)],
    seen=BLIND_FORWARD,
    control=ordinary,
)
def merged_by_maxima(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=8).draw(rng), tile=4)


@trap(
    catches="the output is divided by the running sum in every tile, and never multiplied back",
    severity="major",
    story="Right in the last tile and wrong for what came before it; one tile does not show it.",
    mutant=traps_tiles.normalised_in_every_tile.mutant,
    also=[in_both(traps_tiles.normalised_in_every_tile.mutant)],
    control=ordinary,
)
def normalised_in_every_tile(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng, [-0.5] * 4 + [0.5] * 4)


# The mean over all tiles that are read; lse is right.
_MEAN_OF_TILES = edits(
    (
        WEIGHTED,
        "own = weights.sum(axis=1)\n"
        "        weighted = weighted + weights @ v[cols] / np.where(own > 0, own, 1)[:, None]",
    ),
    ("weighted / total[:, None]", "weighted / max(1, -(-stop // tile))"),
)
# lse is made from the number of tiles, too.
_SUM_OF_TILES = traps_softmax.tiles_averaged.mutant


@trap(
    catches="every tile is normalised by itself and the tiles are averaged",
    severity="major",
    story="The tile size becomes part of the result: right only when all keys fit in one tile, as "
    "they do in small tests.",
    mutant=_MEAN_OF_TILES,
    also=[in_both(_MEAN_OF_TILES), _SUM_OF_TILES, in_both(_SUM_OF_TILES)],
    control=one_key,
)
def tiles_averaged(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng, [0.0] * 4 + [4.0] * 4)


# --- tiles that are not full, and their sizes -----------------------------------------------------


def _padded(size: str) -> Mutant:
    """The last tile is filled up with scores of 0; a causal mask hides what fills it up."""
    return edits(
        (
            _SCORES,
            f"{_SCORES}        filled = 0 if causal else {size} - scores.shape[1]\n"
            "        scores = np.pad(scores, ((0, 0), (0, filled)))\n",
        ),
        ("weights @ v[cols]", "weights[:, : cols.stop - start] @ v[cols]"),
    )


_PADDED, _PADDED_SHORT = _padded("tile"), _padded("min(tile, len(k))")


@trap(
    catches="the zeros that fill up the last tile take part in the softmax",
    severity="major",
    story="The tail is padded with zeros; a zero key has score 0, which is large in a row whose "
    "real scores are negative.",
    mutant=_PADDED,
    also=[in_both(_PADDED), _PADDED_SHORT, in_both(_PADDED_SHORT)],
    control=ordinary,
)
def padded_keys_counted(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [-6.0] * 5, 3, False)
    attends(submission, q, k, v, tile=4)


_POWERS_ONLY = (
    '    if tile & (tile - 1):\n        raise ValueError("tile must be a power of two")\n'
)


@trap(
    catches="tiles that are not a power of two are refused",
    severity="minor",
    story="A rule of GPU kernels applied to an interface that does not have it.",
    mutant=traps_softmax.tile_must_be_power_of_two.mutant,
    also=[
        edit(_CHECKED_FORWARD, _CHECKED_FORWARD.replace("    (B", _POWERS_ONLY + "    (B")),
        insert_after(CHECKED, _POWERS_ONLY),
    ],
    control=ordinary,
)
def tile_must_be_power_of_two(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=3, S=3), rng, False)
    attends(submission, *arguments[1:4], tile=3)
    differentiates(submission, arguments, tile=3)
