"""Bugs of the formula of dx and of the output."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import Rng, problem
from trapline.challenges.layer_norm_backward.situations import (
    WRITTEN_BLIND,
    check_gradients,
    check_y,
    plain,
    split,
)
from trapline.challenges.layer_norm_backward.solution_lines import (
    DX,
    MEAN_G,
    MEAN_GX,
    G,
    Y,
)

_SUM_G = "mean_g = np.sum(g, axis=-1, keepdims=True)"
_SUM_GX = "mean_gx = np.sum(g * x_hat, axis=-1, keepdims=True)"
_RATIO = "ratio = np.maximum(np.sqrt(np.mean(x_hat * x_hat, axis=-1, keepdims=True)), 1e-30)"

# --- the factors of dx ----------------------------------------------------------------------------


@trap(
    catches="dx computed from dy instead of dy · gamma",
    severity="major",
    story="Invisible with gamma = 1, which is how gamma is initialised and how most tests call it.",
    mutant=edit(G, "    g = dy\n"),
)
def gamma_missing_in_dx(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng), "dx")


@trap(
    catches="gamma multiplied into dx last, after the means are taken of dy alone",
    severity="major",
    story="gamma differs from feature to feature: it does not commute with a mean over features.",
    mutant=edits((G, "    g = dy\n"), (DX, DX.replace("dx = ", "dx = gamma * "))),
    also=[
        # After the first mean alone.
        edits(
            (G, "    g = (dy - np.mean(dy, axis=-1, keepdims=True)) * gamma\n"),
            (DX, DX.replace(" - mean_g", "")),
        )
    ],
    seen=WRITTEN_BLIND,
)
def gamma_after_the_means(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng), "dx")


@trap(
    catches="dx not multiplied by 1 / √(var + eps)",
    severity="critical",
    story="Invisible on standard normal inputs, where the factor is close to 1.",
    mutant=edit(DX, "dx = g - mean_g - x_hat * mean_gx"),
    seen=WRITTEN_BLIND,
)
def rstd_missing(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, spread=20.0), "dx")


@trap(
    catches="dx divided by var + eps instead of its root",
    severity="major",
    story="Invisible on standard normal inputs, where both factors are close to 1.",
    mutant=edit(DX, DX.replace("rstd[..., None]", "rstd[..., None] ** 2.0")),
)
def rstd_squared(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, spread=20.0), "dx")


@trap(
    catches="dx multiplied by √(var + eps) instead of divided by it",
    severity="major",
    story="A cache called `std` holds its reciprocal, or the other way round.",
    mutant=edit(DX, DX.replace("rstd[..., None]", "1.0 / rstd[..., None]")),
)
def rstd_inverted(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, spread=20.0), "dx")


@trap(
    catches="the direct path is lost: dx keeps only the path through the variance",
    severity="critical",
    story="A gradient that arrives by a second path replaces the first instead of being added.",
    mutant=edit(DX, "dx = -rstd[..., None] * x_hat * mean_gx"),
    seen=WRITTEN_BLIND,
)
def direct_path_lost(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng), "dx")


@trap(
    catches="rstd / D · (g − Σ g − x_hat · Σ g · x_hat): g itself is not multiplied by D",
    severity="major",
    story="The closed form with a factor 1 / D in front needs D · g.",
    mutant=edits(
        (MEAN_G, _SUM_G),
        (MEAN_GX, _SUM_GX),
        (DX, DX.replace("rstd[..., None]", "rstd[..., None] / dy.shape[-1]")),
    ),
)
def direct_term_not_times_width(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng), "dx")


@trap(
    catches="rstd · (D · g − Σ g − x_hat · Σ g · x_hat): the factor 1 / D is missing",
    severity="major",
    story="The closed form with D · g needs a factor 1 / D in front.",
    mutant=edit(DX, DX.replace("rstd[..., None]", "dy.shape[-1] * rstd[..., None]")),
)
def dx_not_divided_by_width(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng), "dx")


@trap(
    catches="dx has the opposite sign",
    severity="major",
    story="A gradient of the loss and a step against it are taken for the same.",
    mutant=edit(DX, DX.replace("dx = ", "dx = -")),
)
def dx_negated(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng), "dx")


@trap(
    catches="(B, T) statistics broadcast along features: no error when T = D, only wrong numbers",
    severity="major",
    story="A forgotten keepdims raises for most shapes and is silent for square ones.",
    mutant=edit(DX, "dx = rstd[:, None, :] * (g - mean_g - x_hat * mean_gx)"),
)
def square_sequence(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 5, 5))
    check_gradients(submission, p._replace(x=p.x * np.arange(1.0, 6.0)[:, None]), "dx")


# --- the path through the mean --------------------------------------------------------------------


@trap(
    catches="dx without − mean(g): the path through the mean is forgotten",
    severity="critical",
    story="The mean is treated as a constant; training still goes down, more slowly.",
    mutant=edit(DX, "dx = rstd[..., None] * (g - x_hat * mean_gx)"),
    seen=WRITTEN_BLIND,
)
def mean_term_missing(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0), "dx")


@trap(
    catches="dx with + mean(g) instead of − mean(g)",
    severity="major",
    story="The derivative of −mean loses its sign.",
    mutant=edit(DX, DX.replace("- mean_g ", "+ mean_g ")),
)
def mean_term_sign(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0), "dx")


@trap(
    catches="dx with Σ g where mean(g) belongs: not divided by D",
    severity="major",
    story="A sum over features is subtracted from single features.",
    mutant=edit(MEAN_G, _SUM_G),
)
def mean_term_not_averaged(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0), "dx")


@trap(
    catches="the mean of g taken over rows instead of features",
    severity="critical",
    story="Axis 0 of a block of rows is not the axis that the forward pass averaged.",
    mutant=edit(MEAN_G, "mean_g = np.sum(g, axis=(0, 1)) / max(dy.shape[0] * dy.shape[1], 1)"),
    seen=WRITTEN_BLIND,
)
def mean_of_g_over_rows(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0), "dx")


@trap(
    catches="the mean of g taken over positions (axis 1) instead of features",
    severity="major",
    story="Axis 1 holds the features of a matrix and the positions of a batch of sequences.",
    mutant=edit(MEAN_G, "mean_g = np.sum(g, axis=1, keepdims=True) / max(dy.shape[1], 1)"),
)
def mean_of_g_over_positions(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0), "dx")


@trap(
    catches="one mean of g for the whole array instead of one for each row",
    severity="major",
    story="A reduction without `axis` gives one number for all rows.",
    mutant=edit(MEAN_G, "mean_g = np.sum(g) / max(g.size, 1)"),
)
def mean_of_g_over_everything(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0), "dx")


@trap(
    catches="mean(dy) where mean(dy · gamma) belongs: the mean term of dx ignores gamma",
    severity="critical",
    story="The sum runs before dy is multiplied by gamma.",
    mutant=edit(MEAN_G, "mean_g = np.mean(dy, axis=-1, keepdims=True)"),
    seen=WRITTEN_BLIND,
)
def mean_of_dy(submission: Submission, rng: Rng) -> None:
    p = split(rng, mean=1.0)
    check_gradients(submission, p._replace(gamma=np.full_like(p.gamma, 3.0)), "dx")


# --- the path through the variance ----------------------------------------------------------------


@trap(
    catches="dx without − x_hat · mean(g · x_hat): the path through the variance is forgotten",
    severity="major",
    story="The variance is treated as a constant; the gradient keeps a component along x_hat.",
    mutant=edit(DX, "dx = rstd[..., None] * (g - mean_g)"),
)
def variance_term_missing(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="dx with + x_hat · mean(g · x_hat)",
    severity="major",
    story="A sign lost between −1/2 · var^(−3/2) and the final formula.",
    mutant=edit(DX, "dx = rstd[..., None] * (g - mean_g + x_hat * mean_gx)"),
)
def variance_term_sign(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="the path through the variance halved: the derivative of (x − mean)² lacks its 2",
    severity="critical",
    story="The 2 of the square and the 1/2 of the root cancel, and only one of them is there.",
    mutant=edit(DX, DX.replace("x_hat * mean_gx", "0.5 * x_hat * mean_gx")),
    seen=WRITTEN_BLIND,
)
def variance_term_halved(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="the path through the variance doubled: the derivative of the root lacks its 1/2",
    severity="major",
    story="The 2 of the square and the 1/2 of the root cancel, and only one of them is there.",
    mutant=edit(DX, DX.replace("x_hat * mean_gx", "2.0 * x_hat * mean_gx")),
)
def variance_term_doubled(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="Σ g · x_hat where mean(g · x_hat) belongs: the variance term of dx is D times too "
    "large",
    severity="critical",
    story="The division by D is lost on the way from the sum to the formula.",
    mutant=edit(MEAN_GX, _SUM_GX),
    seen=WRITTEN_BLIND,
)
def projection_not_averaged(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="Σ g and Σ g · x_hat where their means belong: both terms of dx are D times too large",
    severity="major",
    story="The closed form with sums has a factor 1 / D in front of both.",
    mutant=edits((MEAN_G, _SUM_G), (MEAN_GX, _SUM_GX)),
)
def sums_for_means(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0, along=1.0), "dx")


@trap(
    catches="row means divided by T instead of D",
    severity="major",
    story="`shape[1]` is the width of a matrix and the length of a batch of sequences.",
    mutant=edit(MEAN_GX, "mean_gx = np.sum(g * x_hat, axis=-1, keepdims=True) / dy.shape[1]"),
)
def divided_by_the_wrong_length(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="mean(g · x_hat) taken over rows instead of features",
    severity="major",
    story="That sum over rows is dgamma; dx needs the one over features.",
    mutant=edit(
        MEAN_GX, "mean_gx = np.sum(g * x_hat, axis=(0, 1)) / max(dy.shape[0] * dy.shape[1], 1)"
    ),
)
def projection_over_rows(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="mean(dy · x_hat) where mean(dy · gamma · x_hat) belongs",
    severity="critical",
    story="dgamma needs dy · x_hat and dx needs g · x_hat; one product is reused for both.",
    mutant=edit(MEAN_GX, MEAN_GX.replace("g * x_hat", "dy * x_hat")),
    seen=WRITTEN_BLIND,
)
def projection_of_dy(submission: Submission, rng: Rng) -> None:
    p = split(rng, along=1.0)
    check_gradients(submission, p._replace(gamma=np.full_like(p.gamma, 3.0)), "dx")


@trap(
    catches="mean(g) and mean(g · x_hat) both taken of dy without gamma",
    severity="major",
    story="gamma reaches the direct term of dx only.",
    mutant=edits(
        (MEAN_G, "mean_g = np.mean(dy, axis=-1, keepdims=True)"),
        (MEAN_GX, MEAN_GX.replace("g * x_hat", "dy * x_hat")),
    ),
)
def means_of_dy(submission: Submission, rng: Rng) -> None:
    p = split(rng, mean=1.0, along=1.0)
    check_gradients(submission, p._replace(gamma=np.full_like(p.gamma, 3.0)), "dx")


@trap(
    catches="− mean(g · x_hat) without its factor x_hat",
    severity="major",
    story="The same number is subtracted from every feature of a row.",
    mutant=edit(DX, DX.replace("x_hat * mean_gx", "mean_gx")),
)
def projection_without_x_hat(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="(x − mean) · mean(g · x_hat) where x_hat · mean(g · x_hat) belongs",
    severity="major",
    story="Invisible on standard normal inputs, where x − mean and x_hat are nearly equal.",
    mutant=edit(DX, DX.replace("x_hat * mean_gx", "x_hat / rstd[..., None] * mean_gx")),
    seen=WRITTEN_BLIND,
)
def projection_along_centred(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0, spread=20.0), "dx")


@trap(
    catches="one of the two x_hat in the variance term of dx is normalised without eps",
    severity="critical",
    story="x_hat has length 1 only without eps; its ratio to a unit row enters squared.",
    mutant=edit(DX, f"{_RATIO}\n    " + DX.replace("x_hat * mean_gx", "x_hat * mean_gx / ratio")),
    seen=WRITTEN_BLIND,
)
def ratio_not_squared(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0)._replace(eps=0.5), "dx")


@trap(
    catches="the component of g along x_hat is removed whole, as if x_hat had length 1 in spite of "
    "eps",
    severity="major",
    story="dx as an orthogonal projection is right for eps = 0 only.",
    mutant=edit(
        DX, f"{_RATIO}\n    " + DX.replace("x_hat * mean_gx", "x_hat * mean_gx / ratio**2.0")
    ),
    seen=WRITTEN_BLIND,
)
def whole_projection_removed(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0)._replace(eps=0.5), "dx")


# --- the output -----------------------------------------------------------------------------------


@trap(
    catches="gamma · (x_hat + beta) instead of gamma · x_hat + beta",
    severity="major",
    story="Invisible while beta is 0 or gamma is 1, which both are at the start of training.",
    mutant=edit(Y, "y = gamma * (x_hat + beta)"),
    seen=WRITTEN_BLIND,
)
def beta_scaled(submission: Submission, rng: Rng) -> None:
    check_y(submission, problem(rng))


@trap(
    catches="beta is not added to y",
    severity="major",
    story="Invisible while beta is 0, which it is at the start of training.",
    mutant=edit(Y, "y = gamma * x_hat"),
)
def beta_missing(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng))


@trap(
    catches="y is not multiplied by gamma",
    severity="major",
    story="Invisible while gamma is 1, which it is at the start of training.",
    mutant=edit(Y, "y = x_hat + beta"),
)
def gamma_missing_in_y(submission: Submission, rng: Rng) -> None:
    check_y(submission, problem(rng))


@trap(
    catches="y multiplied by 1 + gamma",
    severity="major",
    story="Some models store gamma − 1; this contract does not.",
    mutant=edit(Y, "y = (1.0 + gamma) * x_hat + beta"),
)
def gamma_plus_one(submission: Submission, rng: Rng) -> None:
    check_y(submission, problem(rng))


@trap(
    catches="gamma and beta exchanged: y = beta · x_hat + gamma",
    severity="major",
    story="Two vectors of the same shape are passed in the wrong order.",
    mutant=edit(Y, "y = beta * x_hat + gamma"),
)
def gamma_and_beta_exchanged(submission: Submission, rng: Rng) -> None:
    check_y(submission, problem(rng))
