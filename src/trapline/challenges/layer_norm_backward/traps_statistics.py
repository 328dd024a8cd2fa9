"""Bugs of the statistics."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import Array, Rng, check_both, forward
from trapline.challenges.layer_norm_backward.situations import (
    WRITTEN_BLIND,
    check_y,
    far_from_eps,
    ordinary_float32,
    ordinary_rows,
    plain,
)
from trapline.challenges.layer_norm_backward.solution_lines import CENTRED, VAR, X_HAT, Y

# Parts of the gold solution that several mutants edit.
_WELFORD = (
    "running, squares = np.zeros(x.shape[:2]), np.zeros(x.shape[:2])\n"
    "    for seen in range(x.shape[-1]):\n"
    "        delta = wide[..., seen] - running\n"
    "        running = running + delta / (seen + 1)\n"
    "        squares = squares + {square}\n"
    "    var = squares / x.shape[-1]"
)


def _two_values(rng: Rng, offset: float, step: float) -> Array:
    """Rows of offset ± step: every order of sums gives E[x²] − E[x]² = 0 when digits are lost."""
    signs = rng.permuted(np.tile([-1.0, -1.0, -1.0, 1.0], (2, 3, 4)), axis=-1)
    return offset + step * signs


@trap(
    catches="variance as E[x²] − E[x]², which cancels when the mean is much larger than the spread",
    severity="major",
    story="For rows around 1e8 that vary by 1, the difference has no correct digit.",
    mutant=edit(VAR, "var = np.mean(wide * wide, axis=-1) - np.mean(wide, axis=-1) ** 2"),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def mean_1e8(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 16))
    check_y(submission, p._replace(x=_two_values(rng, 2.0**27, 1.0)))


@trap(
    catches="variance as E[x²] − E[x]² in float32, where an offset of a few thousand is enough",
    severity="major",
    story="In float32 the cancellation can make the variance negative and the result NaN.",
    mutant=edit(VAR, "var = np.mean(x * x, axis=-1) - np.mean(x, axis=-1) ** 2"),
    control=ordinary_float32,
)
def float32_mean_4096(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 16), np.float32)
    check_y(submission, p._replace(x=_two_values(rng, 4096.0, 0.5).astype(np.float32)))


@trap(
    catches="rows of a single feature (D = 1) are not normalised: y is gamma · x + beta, not beta",
    severity="major",
    story="A row of one feature has no spread; its output is beta whatever x is.",
    mutant=edit(Y, "y = gamma * (x if x.shape[-1] == 1 else x_hat) + beta"),
    control=ordinary_rows,
)
def one_feature(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 1), offset=3.0))


@trap(
    catches="variance divided by D − 1 instead of D",
    severity="critical",
    story="A tensor library's default is ddof = 1; layer norm's is not.",
    mutant=edit(VAR, "var = np.sum(centred * centred, axis=-1) / max(x.shape[-1] - 1, 1)"),
    seen=WRITTEN_BLIND,
)
def unbiased_variance(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng, (2, 3, 4)))


@trap(
    catches="mean and variance taken over positions too",
    severity="major",
    story="Normalising over the last two axes passes every test with one position.",
    mutant=edits(
        (CENTRED, "centred = wide - np.mean(wide, axis=(1, 2), keepdims=True)"),
        (VAR, "var = np.mean(centred * centred, axis=(1, 2))[:, None] + np.zeros(x.shape[:2])"),
    ),
)
def rows_share_statistics(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng, (2, 4, 6)))


@trap(
    catches="each feature normalised over batch and positions, as batch norm does",
    severity="major",
    story="The axes of a batch norm are copied with the rest of its code.",
    mutant=edits(
        (CENTRED, "centred = wide - np.mean(wide, axis=(0, 1), keepdims=True)"),
        (X_HAT, "x_hat = centred / np.sqrt(np.mean(centred * centred, axis=(0, 1)) + eps)"),
    ),
)
def batch_statistics(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="normalised over positions (axis 1) instead of features (the last axis)",
    severity="major",
    story="Axis 1 holds the features of a matrix and the positions of a batch of sequences.",
    mutant=edits(
        (CENTRED, "centred = wide - np.mean(wide, axis=1, keepdims=True)"),
        (X_HAT, "x_hat = centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + eps)"),
    ),
)
def statistics_of_positions(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="mean and variance taken over the whole array, not row by row",
    severity="major",
    story="A reduction without `axis` gives one number for all rows.",
    mutant=edits(
        (CENTRED, "centred = wide - (np.mean(wide) if x.size else 0.0)"),
        (VAR, "var = np.full(x.shape[:2], np.mean(centred * centred) if x.size else 0.0)"),
    ),
)
def statistics_of_everything(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="Welford's update adds (x − old mean)², not (x − old mean) · (x − new mean)",
    severity="critical",
    story="The online variance is then too large for every row that is not constant.",
    mutant=edit(VAR, _WELFORD.format(square="delta * delta")),
    seen=WRITTEN_BLIND,
)
def welford_with_the_old_mean(submission: Submission, rng: Rng) -> None:
    """The first feature is 0, where a recurrence starts, with or without a shift."""
    p = far_from_eps(rng)
    p.x[..., 0] = 0.0
    check_y(submission, p)


@trap(
    catches="Welford's update adds (x − new mean)², not (x − old mean) · (x − new mean)",
    severity="major",
    story="The online variance is then too small for every row that is not constant.",
    mutant=edit(VAR, _WELFORD.format(square="(wide[..., seen] - running) ** 2")),
)
def welford_with_the_new_mean(submission: Submission, rng: Rng) -> None:
    """The first feature is 0, where a recurrence starts, with or without a shift."""
    p = far_from_eps(rng)
    p.x[..., 0] = 0.0
    check_y(submission, p)


@trap(
    catches="variances of the parts of a row are averaged without the spread between their means",
    severity="major",
    story="Chunks and threads each have their own mean; merging needs a correction for it.",
    mutant=edit(
        VAR,
        "half = (x.shape[-1] + 1) // 2\n"
        "    parts = [part for part in (wide[..., :half], wide[..., half:]) if part.shape[-1]]\n"
        "    var = sum(np.var(p, axis=-1) * p.shape[-1] for p in parts) / x.shape[-1]",
    ),
)
def chunk_variances_averaged(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="division by var + eps: the square root is forgotten",
    severity="major",
    story="Invisible on rows of variance 1.",
    mutant=edit("rstd = 1.0 / np.sqrt(var + eps)", "rstd = 1.0 / (var + eps)"),
)
def root_forgotten(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="x divided by its deviation without subtracting the mean",
    severity="major",
    story="Invisible on rows of mean 0.",
    mutant=edit(X_HAT, "x_hat = wide * rstd[..., None]"),
)
def x_not_centred(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="the variance is the mean of x², not of (x − mean)²",
    severity="major",
    story="Invisible on rows of mean 0.",
    mutant=edit(VAR, "var = np.mean(wide * wide, axis=-1)"),
)
def second_moment_for_variance(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="RMS norm in place of layer norm: the mean is never subtracted",
    severity="major",
    story="Invisible on rows of mean 0.",
    mutant=edit(CENTRED, "centred = wide"),
)
def rms_norm(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="the mean absolute deviation in place of the standard deviation",
    severity="major",
    story="Both measure spread; they differ by a fifth for normal values.",
    mutant=edit(VAR, "var = np.mean(np.abs(centred), axis=-1) ** 2"),
)
def mean_absolute_deviation(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


_MEAN_BY_WEIGHTS = "centred = wide - (wide @ np.full(x.shape[-1], 1 / x.shape[-1]))[..., None]"


@trap(
    catches="the mean of a constant row is not the value that all its elements have: 1 / D is "
    "rounded, and where the values are huge, what is left of them is far above eps and y is not "
    "beta",
    severity="minor",
    story="D times the rounded 1 / D is not 1; a residual of 1e14 is normalised to 1.",
    mutant=edit(CENTRED, _MEAN_BY_WEIGHTS),
    also=[
        # Centred twice: the residual is smaller, and still large against eps.
        edit(
            CENTRED,
            f"{_MEAN_BY_WEIGHTS}\n    centred = centred"
            " - (centred @ np.full(x.shape[-1], 1 / x.shape[-1]))[..., None]",
        ),
        edit(CENTRED, "centred = wide - np.sum(wide * (1 / x.shape[-1]), axis=-1, keepdims=True)"),
    ],
    seen=WRITTEN_BLIND,
    control=ordinary_float32,
)
def huge_constant_rows(submission: Submission, rng: Rng) -> None:
    """float64 holds the sum of so few equal float32 values exactly; of scaled ones it is D."""
    for width in (7, 11, 49):
        p = plain(rng, (2, 16, width), np.float32)
        rows = rng.uniform(1e29, 1e30, (2, 16, 1)).astype(np.float32)
        p = p._replace(x=np.repeat(rows, width, axis=-1))
        y, _ = forward(submission, p)
        y = expect.array(y, shape=p.x.shape, dtype=p.x.dtype, what="y")
        expect.close(y, np.broadcast_to(p.beta, y.shape), rtol=1e-6, what="y of constant rows")
