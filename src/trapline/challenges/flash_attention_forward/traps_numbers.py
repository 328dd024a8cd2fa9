"""Bugs with extreme numbers."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import attends, pair
from trapline.challenges.flash_attention_forward.situations import WRITTEN, with_logits
from trapline.challenges.flash_attention_forward.solution_lines import ORIGIN


@trap(
    catches="−1e30 stands for −inf somewhere, and finite scores below it count as hidden",
    severity="major",
    story="A floor under the running maximum saves a branch; the constant comes from another "
    "dtype's range.",
    mutant=edit(ORIGIN, "np.maximum(new_peak, q.dtype.type(-1e30))"),
    also=[edit("np.full(rows, -np.inf, q.dtype)", "np.full(rows, -1e30, q.dtype)")],
)
def scores_below_sentinel(submission: Submission, rng: np.random.Generator) -> None:
    for unit, dtype in ((-1e200, np.float64), (-1e36, np.float32)):
        # The first key has all the weight, so its value is the answer without rounding.
        q, k, v = with_logits(rng, unit * np.arange(1, 7), 6, dtype)
        for tile in (4, 16):
            out, lse = pair(submission.flash_attention(q, k, v, causal=True, tile=tile))
            expect.array(lse, shape=(1, 1, 6), dtype=dtype, what="lse")
            expect.array(out, shape=(1, 1, 6, 4), dtype=dtype, what="out")
            slack = 8.0 * float(np.finfo(dtype).eps)
            expect.close(out, np.repeat(v[:, :, :1], 6, axis=2), rtol=slack, what="out")
            expect.close(lse, np.full((1, 1, 6), unit), rtol=slack, what="lse")


@trap(
    catches="the correction is left out while the maximum rises by less than 1e-6",
    severity="minor",
    story="Skipping needless rescaling is a real speed-up when the old maximum is kept; with the "
    "new one every skipped step is an error far above float64's rounding.",
    mutant=edit("peak - origin", "np.where(origin - peak < 1e-6, 0, peak - origin)"),
)
def small_rise_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, 5e-7 * np.arange(12), 3, np.float64), tile=2)


_MAXIMUM = "new_peak = np.maximum(peak, scores.max(axis=1))"


def _lazy(most: str) -> Mutant:
    """The old maximum is kept while the new one exceeds it by no more than `most`."""
    return edit(
        _MAXIMUM,
        f"{_MAXIMUM}\n        new_peak = np.where(new_peak <= peak + {most}, peak, new_peak)",
    )


def _rise(submission: Submission, rng: np.random.Generator, narrow: float, wide: float) -> None:
    """The maximum rises so much from one tile to the next, in float32 and in float64."""
    for rise, dtype in ((narrow, np.float32), (wide, np.float64)):
        attends(submission, *with_logits(rng, np.repeat([0.0, rise], 8), 3, dtype), tile=8)


def rises_within_range(submission: Submission, rng: np.random.Generator) -> None:
    _rise(submission, rng, 60.0, 80.0)


@trap(
    catches="the old maximum is kept while the new one is not much larger, and exp of the "
    "difference or the sum of such weights overflows",
    severity="major",
    story="Rescaling only after a large rise saves work, but the bound must fit the dtype: "
    "exp(100) is infinite in float32, and eight times exp(87.5), too.",
    mutant=_lazy("100"),
    also=[_lazy("1000")],
    seen=WRITTEN,
    control=rises_within_range,
)
def kept_maximum_overflows(submission: Submission, rng: np.random.Generator) -> None:
    _rise(submission, rng, 87.5, 708.5)


@trap(
    catches="weights below 1e-8 are set to 0, also in float64",
    severity="minor",
    story="The threshold is below float32's rounding error; in float64 it costs half of the "
    "digits.",
    mutant=insert_after(
        "weights = np.exp(scores - origin[:, None])",
        "\n        weights = np.where(weights < 1e-8, 0, weights)",
    ),
)
def small_weights_dropped(submission: Submission, rng: np.random.Generator) -> None:
    logits = np.array([0.0, -19.0, -19.5, -20.0])
    attends(submission, *with_logits(rng, logits, 3, np.float64), tile=4)
