"""Bugs of the softmax."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import DTYPES, LONG, Rng, ask, logits_of
from trapline.challenges.fused_softmax_topk.solution_lines import ANSWER, PROBS

# Parts of the gold solution that several mutants edit.
_NEW = "new = max(largest, tile_max)"
_NOTHING_YET = "if new == -np.inf:"
_SUM = "return new, total * _weights(largest, new) + np.sum(_weights(tile, new))"
_EXP = "return np.exp(values - largest)"


@trap(
    catches="exp of the raw logits: inf / inf from a logit of 89 on in float32",
    severity="critical",
    story="The textbook formula without the maximum; logits of untrained heads reach hundreds.",
    mutant=edit(_NEW, "new = 0.0"),
)
def exp_overflow(submission: Submission, rng: Rng) -> None:
    for dtype, offset in ((np.float16, 2e4), (np.float32, 1e4), (np.float64, 1e4)):
        ask(submission, (logits_of(rng, (2, 30)) + offset).astype(dtype), 5)


@trap(
    catches="probabilities divided by the sum of the k kept ones",
    severity="critical",
    story="It is right for sampling among the k, but it is not the probability under the softmax.",
    mutant=edit(
        ANSWER, "weights = _weights(best, largest)\n    return weights / weights.sum(), places"
    ),
)
def normalised_over_k(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (3, 40)), 4)


@trap(
    catches="the running sum multiplied by exp(new − old) when the maximum rises",
    severity="critical",
    story="Said to be invisible in the output; it shows as soon as a later tile has a larger "
    "maximum.",
    mutant=edit(
        "total * _weights(largest, new)", "(total * np.exp(new - largest) if total else 0.0)"
    ),
)
def rescale_direction(submission: Submission, rng: Rng) -> None:
    rising = np.linspace(-8.0, 8.0, LONG)[None] + 0.01 * rng.standard_normal((1, LONG))
    ask(submission, rising, 4)


@trap(
    catches="the running sum kept as it is when the maximum rises",
    severity="critical",
    story="Works on rows whose maximum is in the first tile, as in sorted test data.",
    mutant=edit("total * _weights(largest, new)", "total"),
)
def rescale_missing(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, LONG), np.float32)
    logits[0, -1] = 20.0
    ask(submission, logits, 4)


@trap(
    catches="−inf − (−inf) = NaN when every logit so far is −inf",
    severity="critical",
    story="Grammar masks can forbid the whole beginning of a vocabulary.",
    mutant=edit(_NOTHING_YET, "if False:"),
)
def masked_first_tile(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = logits_of(rng, (2, LONG), dtype)
        logits[:, : LONG - 30] = -np.inf
        ask(submission, logits, 5)


@trap(
    catches="a tile of −inf after finite ones that spoils the sum",
    severity="major",
    story="The end of a padded vocabulary is masked, and the maximum of that tile alone is −inf.",
    mutant=edits(
        (_NEW, "new = tile_max"),
        (_NOTHING_YET, "if largest == tile_max == -np.inf:"),
    ),
)
def masked_later_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG), np.float32)
    logits[:, 30:] = -np.inf
    ask(submission, logits, 40)


@trap(
    catches="exp(x − (m + log Σ)): the logarithm vanishes beside a large m, the sum is above 1",
    severity="major",
    story="A log-sum-exp kept as one number cannot represent log 2 beside 1e17.",
    mutant=edit(ANSWER, "return np.exp(best - (largest + np.log(total))), places"),
)
def lse_absorbed(submission: Submission, rng: Rng) -> None:
    for dtype, size in ((np.float64, 1e17), (np.float32, 1e17)):
        logits = np.zeros((2, 9), dtype)
        logits[:, rng.permutation(9)[:3]] = size
        logits[1] *= -1.0
        ask(submission, logits, 5)


@trap(
    catches="differences of finite logits that leave the range and become NaN",
    severity="major",
    story="Finite masks (the lowest number of a dtype) instead of −inf.",
    mutant=edit(_EXP, "return np.exp(values * 2.0 - largest * 2.0) ** 0.5"),
)
def extreme_range(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        info = np.finfo(dtype)
        logits = np.full((2, 12), info.min, dtype)
        logits[0, rng.integers(12)] = info.max
        ask(submission, logits, 6)


@trap(
    catches="float16 sums, which stop growing at 2048 and overflow at 65504",
    severity="critical",
    story="Half-precision kernels without a wide accumulator give probability 1/2048 in flat rows.",
    mutant=edit(_SUM, _SUM.replace("total *", "np.float16(total *") + ")"),
)
def float16_sum(submission: Submission, rng: Rng) -> None:
    logits = np.full((1, 70001), rng.integers(-4, 5), np.float16)
    ask(submission, logits, 3)


@trap(
    catches="x − m and its exponential rounded to float16",
    severity="major",
    story="One rounding to 11 bits before the exponential costs a percent after it.",
    mutant=edit(_EXP, "return np.exp(np.float64(np.float16(values - largest)))"),
)
def float16_differences(submission: Submission, rng: Rng) -> None:
    logits = np.linspace(-9.0, 9.0, 300).astype(np.float16)[None]
    logits = np.repeat(logits, 4, axis=0)
    ask(submission, rng.permuted(logits, axis=1) + np.float16(0), 250)
    # Half of the sum comes from differences that lie half a float16 step from the next one.
    flat = np.full((1, 70001), 0.0038, np.float16)
    flat[0, 0] = 11.0  # first, so that it is the maximum for every tile
    ask(submission, flat, 3)


@trap(
    catches="float64 probabilities computed in float32",
    severity="major",
    story="A cast to the kernel's dtype leaves seven correct digits in a float64 answer.",
    mutant=edit(_EXP, "return np.exp(np.float32(values - largest))"),
)
def float64_in_float32(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 50)), 10)


@trap(
    catches="float32 or float64 probabilities for narrower logits",
    severity="major",
    story="The accumulator's dtype is returned and doubles the size of the answer.",
    mutant=edit(PROBS, "probs = np.empty((rows, k))"),
)
def dtype_widened(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float16, np.float32):
        ask(submission, logits_of(rng, (2, 20), dtype), 3)
