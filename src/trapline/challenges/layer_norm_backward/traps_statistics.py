"""Bugs of the statistics."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import Rng, check_both
from trapline.challenges.layer_norm_backward.situations import plain
from trapline.challenges.layer_norm_backward.solution_lines import VAR, Y

# Parts of the gold solution that several mutants edit.
_NAIVE = "var = np.mean(x * x, axis=-1) - np.mean(x, axis=-1) ** 2"
_RSTD = "rstd = 1.0 / np.sqrt(var + eps)"


@trap(
    catches="variance as E[x²] − E[x]², which cancels when the mean is much larger than the spread",
    severity="critical",
    story="Graded answers showed naive variance 0.000 where 2.000 was right; several libraries "
    "shipped it.",
    mutant=edit(VAR, _NAIVE),
)
def mean_1e8(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16), offset=1e8))


@trap(
    catches="variance as E[x²] − E[x]² in float32, where an offset of a few thousand is enough",
    severity="critical",
    story="In float32 the cancellation can make the variance negative and the result NaN.",
    mutant=edit(VAR, _NAIVE),
)
def float32_mean_4096(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16), np.float32, offset=4096.0, spread=0.5))


@trap(
    catches="a row without spread is divided by its standard deviation of 0",
    severity="critical",
    story="Padding positions carry constant rows; without epsilon they become NaN.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var)"),
)
def constant_row(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 8))
    p.x[:, 1] = rng.integers(-4, 5)
    p.x[0, 2] = 0.0
    check_both(submission, p)


@trap(
    catches="D = 1 is treated as a special case: the output is exactly beta, with dx = 0",
    severity="major",
    story="D = 1 was one of the edge cases that only one graded answer tested.",
    mutant=edit(Y, "y = gamma * (x if x.shape[-1] == 1 else x_hat) + beta"),
)
def one_feature(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 1), offset=3.0))


@trap(
    catches="1 / (√var + eps) instead of 1 / √(var + eps)",
    severity="major",
    story="Two frameworks place epsilon differently, and converted models drift.",
    mutant=edit(_RSTD, "rstd = 1.0 / (np.sqrt(var) + eps)"),
)
def eps_outside_the_root(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    catches="max(var, eps) instead of var + eps",
    severity="major",
    story="A clamp looks like the same protection and changes every row of small variance.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(np.maximum(var, eps))"),
)
def eps_as_a_floor(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=0.3, eps=0.05))


@trap(
    catches="the default epsilon used whatever the caller passes",
    severity="major",
    story="A configured epsilon of 1e-12 is lost in a kernel with a constant in it.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var + 1e-5)"),
)
def eps_ignored(submission: Submission, rng: Rng) -> None:
    for eps in (1e-12, 0.5, 2):
        check_both(submission, plain(rng, spread=0.01, eps=eps))


@trap(
    catches="variance divided by D − 1",
    severity="critical",
    story="A tensor library's default is ddof = 1; layer norm's is not.",
    mutant=edit(VAR, "var = np.var(centred, axis=-1, ddof=1)"),
)
def unbiased_variance(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 4)))


@trap(
    catches="mean and variance taken over positions too",
    severity="critical",
    story="Normalising over the last two axes passes every test with one position.",
    mutant=edits(
        (
            "centred = wide - np.mean(wide, axis=-1, keepdims=True)",
            "centred = wide - np.mean(wide, axis=(1, 2), keepdims=True)",
        ),
        (VAR, "var = np.mean(centred * centred, axis=(1, 2))[:, None] + np.zeros(x.shape[:2])"),
    ),
)
def rows_share_statistics(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 4, 6))
    p = p._replace(x=p.x + 5.0 * np.arange(4.0)[:, None])
    check_both(submission, p)
