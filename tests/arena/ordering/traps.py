"""Small bugs of sorting."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap


@trap(
    "equal-values-lost",
    catches="equal values are merged into one",
    severity="critical",
    story="A set was used to make the comparisons fewer.",
)
def equal_values_lost(submission, rng):
    values = rng.integers(0, 4, 40).astype(np.float64)
    expect.equal(submission.sort(values), np.sort(values))


@trap(
    "input-sorted-in-place",
    catches="the caller's own vector is reordered",
    severity="major",
    story="A copy was saved where the caller still needed the original order.",
)
def input_sorted_in_place(submission, rng):
    values = rng.standard_normal(33)
    _, (after,) = submission.observe("sort", values)
    expect.equal(after, values, "the input")


@trap(
    "dtype-widened",
    catches="float32 comes back as float64",
    severity="minor",
    story="A list in between forgot what its numbers had been.",
)
def dtype_widened(submission, rng):
    values = rng.standard_normal(20).astype(np.float32)
    expect.equal(submission.sort(values), np.sort(values))


@trap(
    "equal-values-counted",
    catches="equal neighbours count as inversions",
    severity="major",
    story="A comparison with the wrong strictness.",
)
def equal_values_counted(submission, rng):
    values = np.full(5, rng.standard_normal())
    expect.equal(submission.inversions(values), 0)
