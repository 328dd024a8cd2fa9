"""Small bugs of sorting."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, trap


@trap(
    catches="equal values are merged into one",
    severity="critical",
    story="A set was used to make the comparisons fewer.",
    mutant=edit("    width = 1 <<", "    values = np.unique(values)\n    width = 1 <<"),
)
def equal_values_lost(submission, rng):
    values = rng.integers(0, 4, 40).astype(np.float64)
    expect.equal(submission.sort(values), np.sort(values))


@trap(
    catches="the caller's own vector is reordered",
    severity="major",
    story="A copy was saved where the caller still needed the original order.",
    mutant=edit(
        "return _network(padded)[: len(values)]",
        "values[:] = _network(padded)[: len(values)]\n    return values",
    ),
)
def input_sorted_in_place(submission, rng):
    values = rng.standard_normal(33)
    _, (after,) = submission.observe("sort", values)
    expect.equal(after, values, "the input")


@trap(
    catches="float32 comes back as float64",
    severity="minor",
    story="A list in between forgot what its numbers had been.",
    mutant=edit("np.full(width, np.inf, values.dtype)", "np.full(width, np.inf)"),
)
def dtype_widened(submission, rng):
    values = rng.standard_normal(20).astype(np.float32)
    expect.equal(submission.sort(values), np.sort(values))


@trap(
    catches="equal neighbours count as inversions",
    severity="major",
    story="A comparison with the wrong strictness.",
    mutant=edit("values[:i] > values[i]", "values[:i] >= values[i]"),
)
def equal_values_counted(submission, rng):
    values = np.full(5, rng.standard_normal())
    expect.equal(submission.inversions(values), 0)
