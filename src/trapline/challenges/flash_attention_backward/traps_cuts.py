"""Bugs of numbers that are cut off: clipped scores, a bounded lse, bounded exponents."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.situations import ordinary, with_logits
from trapline.challenges.flash_attention_backward.solution_lines import SCORES, WEIGHTS
from trapline.challenges.flash_attention_forward.cases import Shape, attends

_FORWARD_SCORES = "scores = q @ k[cols].T\n"
_FINITE = "finite = np.where(lse == -np.inf, 0, lse)"


def _clipped(bound: str, *, forward: bool = True, backward: bool = True) -> Mutant:
    """The scores of one pass, or of both, are clipped to this bound."""
    places = (
        (_FORWARD_SCORES, f"scores = np.clip(q @ k[cols].T, -{bound}, {bound})\n"),
        (SCORES, f"scores = np.clip(q @ k[cols].T * D**-0.5, -{bound}, {bound})"),
    )
    return edits(*places[not forward : 1 + backward])


@trap(
    catches="scaled scores are clipped, such as to ±80, in one pass or in both",
    severity="major",
    story="Clipping keeps exp from overflowing, and makes all scores beyond the bound equal.",
    mutant=_clipped("80"),
    also=[
        *(_clipped(bound) for bound in ("50", "88", "700", "1e4")),
        *(_clipped(bound, backward=False) for bound in ("50", "80", "88", "700", "1e4")),
        *(_clipped(bound, forward=False) for bound in ("50", "80", "88", "700", "1e4")),
    ],
    control=ordinary,
)
def scores_clipped(submission: Submission, rng: np.random.Generator) -> None:
    for level in (2e4, -2e4):
        arguments = with_logits(rng, [level, level + 1, level + 0.5], 3, False)
        attends(submission, *arguments[1:4], tile=4)
        differentiates(submission, arguments, tile=4)


@trap(
    catches="the saved lse is bounded before it is subtracted, such as by 0, −1e4 or ±80",
    severity="major",
    story="The bound stands for −inf and for overflow, and a finite lse beyond it is changed, too.",
    mutant=edit(_FINITE, "finite = np.maximum(lse, -1e4)"),
    also=[
        edit(_FINITE, f"finite = {bounded}")
        for bounded in (
            "np.maximum(lse, 0)",
            "np.maximum(lse, -1e3)",
            "np.maximum(lse, -1e9)",
            "np.where(lse < -1e3, 0, lse)",
            "np.where(lse < -1e4, 0, lse)",
            "np.where(lse < -1e9, 0, lse)",
            "np.clip(lse, -80, 80)",
            "np.clip(lse, -1e4, 1e4)",
        )
    ],
    control=ordinary,
)
def lse_bounded(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e4, -3e10):
        arguments = with_logits(rng, [low, low + 1, low + 0.5], 3, False)
        differentiates(submission, arguments, tile=4)


@trap(
    catches="exponents of weights are cut off from below, such as at −20, so that hidden keys keep "
    "a weight in the backward pass",
    severity="major",
    story="exp never underflows then, and exp(−inf) is not 0 either.",
    mutant=edit(WEIGHTS, "return np.exp(np.clip(scores - finite[:, None], -20, 0))"),
    also=[
        edit(WEIGHTS, f"return np.exp(np.{cut})")
        for cut in (
            "maximum(scores - finite[:, None], -20)",
            "clip(scores - finite[:, None], -10, 0)",
            "clip(scores - finite[:, None], -25, 0)",
        )
    ],
    control=ordinary,
)
def exponents_cut_off(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=6, S=6), rng, True), causal=True, tile=8)
