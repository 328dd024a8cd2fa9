"""Bugs of the statistics."""

import numpy as np

from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import Rng, check_both
from trapline.challenges.layer_norm_backward.situations import plain


@trap(
    "mean-1e8",
    catches="variance as E[x²] − E[x]², which cancels when the mean dwarfs the spread",
    severity="critical",
    story="Graded answers showed naive variance 0.000 where 2.000 was right; several libraries"
    " shipped it.",
)
def mean_1e8(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16), offset=1e8))


@trap(
    "float32-mean-4096",
    catches="variance as E[x²] − E[x]² in float32, where an offset of a few thousand is enough",
    severity="critical",
    story="A normalisation kernel returned NaN for activations with a large common offset.",
)
def float32_mean_4096(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16), np.float32, offset=4096.0, spread=0.5))


@trap(
    "constant-row",
    catches="a row without spread divided by its deviation of 0",
    severity="critical",
    story="Padding positions carry constant rows; a missing epsilon made NaN of a whole batch.",
)
def constant_row(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 8))
    p.x[:, 1] = rng.integers(-4, 5)
    p.x[0, 2] = 0.0
    check_both(submission, p)


@trap(
    "one-feature",
    catches="D = 1 treated as a case of its own: normalised it is exactly beta, with dx = 0",
    severity="major",
    story="D = 1 was one of the edge cases that only one graded answer tested.",
)
def one_feature(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 1), offset=3.0))


@trap(
    "eps-outside-the-root",
    catches="1 / (√var + eps) instead of 1 / √(var + eps)",
    severity="major",
    story="Two frameworks place epsilon differently; converted models drifted.",
)
def eps_outside_the_root(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    "eps-as-a-floor",
    catches="max(var, eps) instead of var + eps",
    severity="major",
    story="A clamp looks like the same protection and changes every row of small variance.",
)
def eps_as_a_floor(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=0.3, eps=0.05))


@trap(
    "eps-ignored",
    catches="the default epsilon used whatever the caller passes",
    severity="major",
    story="Configured epsilons of 1e-12 were lost on the way to a kernel with a constant in it.",
)
def eps_ignored(submission: Submission, rng: Rng) -> None:
    for eps in (1e-12, 0.5, 2):
        check_both(submission, plain(rng, spread=0.01, eps=eps))


@trap(
    "unbiased-variance",
    catches="variance divided by D − 1",
    severity="critical",
    story="A tensor library's default is ddof = 1; layer norm's is not.",
)
def unbiased_variance(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 4)))


@trap(
    "rows-share-statistics",
    catches="mean and variance taken over positions too",
    severity="critical",
    story="Normalising over the last two axes passes every test with one position.",
)
def rows_share_statistics(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 4, 6))
    p = p._replace(x=p.x + 5.0 * np.arange(4.0)[:, None])
    check_both(submission, p)
