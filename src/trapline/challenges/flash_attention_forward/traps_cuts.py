"""Bugs of numbers that are cut off: clipped scores, bounded exponents, constants of few digits."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.situations import with_logits
from trapline.challenges.flash_attention_forward.solution_lines import LSE, SCALE

_SCORES = "scores = q @ k[cols].T"
_WEIGHTS = "weights = np.exp(scores - origin[:, None])"


def ordinary(submission: Submission, rng: np.random.Generator) -> None:
    """Scores of a few units, all of them seen."""
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=4)


@trap(
    catches="scaled scores are clipped, such as to ±80",
    severity="major",
    story="Clipping keeps exp from overflowing, and makes all scores beyond the bound equal.",
    mutant=edit(_SCORES, "scores = np.clip(q @ k[cols].T, -80, 80)"),
    also=[
        *(
            edit(_SCORES, f"scores = np.clip(q @ k[cols].T, -{bound}, {bound})")
            for bound in ("30", "50", "88", "100", "500", "700", "1e4")
        ),
        *(
            edit(_SCORES, f"scores = np.minimum(q @ k[cols].T, {bound})")
            for bound in ("80", "88", "700")
        ),
    ],
    control=ordinary,
)
def scores_clipped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, np.array([2e4, 3e4, 3e4 + 1]), 3, np.float64), tile=4)


@trap(
    catches="differences to the maximum are cut off from below, such as at −80, so that hidden "
    "keys keep a weight: rows without any key become a mean",
    severity="major",
    story="exp never underflows then, and exp(−inf) is not 0 either.",
    mutant=edit(_WEIGHTS, "weights = np.exp(np.maximum(scores - origin[:, None], -80))"),
    also=[
        edit(_WEIGHTS, f"weights = np.exp(np.maximum(scores - origin[:, None], {bound}))")
        for bound in ("-10", "-20", "-30")
    ],
    control=ordinary,
)
def exponents_cut_off(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=7, S=4).draw(rng), causal=True, tile=8)


def _base_two(log2e: str, back: str) -> Mutant:
    """Scores in base 2, with a constant of few digits in one place or in both."""
    return edits(
        (SCALE, f"q = q * (D**-0.5 * {log2e})"),
        (_WEIGHTS, "weights = np.exp2(scores - origin[:, None])"),
        ("np.exp(peak - origin)", "np.exp2(peak - origin)"),
        (LSE, f"(peak + np.log2(total)) * {back}"),
    )


@trap(
    catches="exponentials are taken in base 2, and the constant for it has too few digits",
    severity="major",
    story="log₂ e with seven digits is what float32 kernels have; float64 shows it.",
    mutant=_base_two("1.442695", "np.log(2)"),
    also=[
        _base_two("1.442695", "0.693147"),
        _base_two("np.log2(np.e)", "0.693147"),
        _base_two("1.442695", "1 / 1.442695"),
        _base_two("1.4427", "np.log(2)"),
    ],
)
def base_two_of_few_digits(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, np.array([9.0, 3.0, 8.0, 9.5]), 3, np.float64), tile=2)
