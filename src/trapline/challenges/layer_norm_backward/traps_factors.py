"""A factor too many or too few, another axis, another array: in both passes."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import Rng, check_both, problem
from trapline.challenges.layer_norm_backward.situations import (
    check_gradients,
    check_y,
    far_from_eps,
    ordinary_rows,
    plain,
    split,
)
from trapline.challenges.layer_norm_backward.solution_lines import (
    CACHE,
    CENTRED,
    DBETA,
    DGAMMA,
    DX,
    MEAN_G,
    MEAN_GX,
    G,
    Y,
)

_RSTD = "rstd = 1.0 / np.sqrt(var + eps)"
_EPS = "    if not 0.0 < eps < np.inf:\n"
_ROW = "rstd[..., None]"
_OTHER_GX = "mean_gx = np.mean({product}, axis=-1, keepdims=True)"
_LESS = "np.sum({product}, axis=-1, keepdims=True) / max(x_hat.shape[-1] - 1, 1)"
_MEAN_LESS = (MEAN_G, "mean_g = " + _LESS.format(product="g"))
_GX_LESS = (MEAN_GX, "mean_gx = " + _LESS.format(product="g * x_hat"))


# --- the forward pass -----------------------------------------------------------------------------


@trap(
    catches="rows are centred by their median, or by their sum over D − 1, instead of their mean",
    severity="major",
    story="The mean of a row that is symmetric equals its median.",
    mutant=edit(CENTRED, "centred = wide - np.median(wide, axis=-1, keepdims=True)"),
    also=[
        edit(
            CENTRED,
            "centred = wide - np.sum(wide, axis=-1, keepdims=True) / max(x.shape[-1] - 1, 1)",
        )
    ],
)
def centred_by_another_mean(submission: Submission, rng: Rng) -> None:
    p = far_from_eps(rng)
    check_y(submission, p._replace(x=p.x + np.float32(1e4)))


@trap(
    catches="beta is subtracted, or one element of it is added to all features",
    severity="major",
    story="Invisible while beta is 0, which it is at the start of training.",
    mutant=edit(Y, "y = gamma * x_hat - beta"),
    also=[edit(Y, "y = gamma * x_hat + beta[0]")],
)
def beta_added_wrongly(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng))


@trap(
    catches="y is multiplied by the magnitude, the mean or one element of gamma",
    severity="major",
    story="Invisible while gamma is 1, which it is at the start of training.",
    mutant=edit(Y, "y = np.abs(gamma) * x_hat + beta"),
    also=[edit(Y, f"y = {of_gamma} * x_hat + beta") for of_gamma in ("gamma[0]", "gamma.mean()")],
    control=ordinary_rows,
)
def another_gamma_in_y(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    p.gamma[1] = -1.5
    check_y(submission, p)


@trap(
    catches="x is added to y, or dy to dx, as around a residual connection",
    severity="major",
    story="The block around the layer adds its input; the layer does not.",
    mutant=edit(Y, "y = gamma * x_hat + beta + wide"),
    also=[edit(DX, DX + " + dy"), edits((Y, Y + " + wide"), (DX, DX + " + dy"))],
)
def residual_added(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng))


@trap(
    catches="eps is subtracted from the variance, or multiplies it: var − eps or var · (1 + eps)",
    severity="major",
    story="Invisible where the variance is much larger than eps; constant rows become NaN.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var - eps)"),
    also=[
        edit(_RSTD, "rstd = 1.0 / np.sqrt(var * (1.0 + eps))"),
        edit(_RSTD, "rstd = 1.0 / np.sqrt(np.abs(var - eps))"),
        edit(_RSTD, "rstd = 1.0 / np.sqrt(var * eps)"),
    ],
)
def eps_not_added(submission: Submission, rng: Rng) -> None:
    p = plain(rng, spread=0.5, eps=0.1)
    signs = rng.permuted(np.tile([-1.0, 1.0], (2, 3, 4)), axis=-1)
    check_y(submission, p._replace(x=signs * rng.uniform(0.5, 1.5, (2, 3, 1))))


@trap(
    catches="a small eps is replaced by a larger one, or a large one by a smaller",
    severity="major",
    story="A bound against an eps that would vanish in float32.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var + max(eps, 1e-8))"),
    also=[
        edit(_RSTD, f"rstd = 1.0 / np.sqrt(var + {bounded})")
        for bounded in ("max(eps, 1e-7)", "max(eps, 1e-6)", "min(eps, 1e-2)", "min(eps, 1e-3)")
    ],
    control=ordinary_rows,
)
def eps_bounded(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=1e-5, eps=1e-10))
    check_y(submission, plain(rng, spread=0.5, eps=0.5))


@trap(
    catches="a positive finite epsilon is refused: a whole number, one of 1 or more, or a tiny one",
    severity="minor",
    story="A check of the type, or of the usual range, and not of what is asked for.",
    dimension="robustness",
    mutant=edit(_EPS, "    if not isinstance(eps, float) or not 0.0 < eps < np.inf:\n"),
    also=[
        edit(_EPS, f"    if not {bounds}:\n")
        for bounds in ("0.0 < eps < 1.0", "1e-12 < eps < np.inf", "0.0 < eps <= 0.1")
    ],
    control=ordinary_rows,
)
def unusual_eps_refused(submission: Submission, rng: Rng) -> None:
    for eps in (2, 1.5, 1e-15):
        check_y(submission, plain(rng, eps=eps))


@trap(
    catches="rows of a variance of 0, or below eps, are only centred, not divided by √(var + eps)",
    severity="major",
    story="A guard against a division by zero, where eps has made one unnecessary.",
    mutant=edit(_RSTD, "rstd = np.where(var > eps, 1.0 / np.sqrt(var + eps), 1.0)"),
    also=[edit(_RSTD, "rstd = np.where(var > 0.0, 1.0 / np.sqrt(var + eps), 1.0)")],
    control=ordinary_rows,
)
def flat_rows_not_scaled(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 8))
    p.x[0] *= 1e-4
    p.x[:, 1] = rng.integers(-4, 5)
    check_both(submission, p)


# --- what the backward pass reads -----------------------------------------------------------------


@trap(
    catches="the backward pass multiplies by beta where gamma belongs",
    severity="major",
    story="Two vectors of the same shape, and the wrong one is cached.",
    mutant=edit(CACHE, CACHE.replace("gamma.copy()", "beta.copy()")),
)
def beta_for_gamma(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng), "dx")


@trap(
    catches="the backward pass takes x − mean or x for x_hat, in dx as in dgamma",
    severity="major",
    story="Invisible on standard normal inputs, where all three are nearly equal.",
    mutant=edit(CACHE, CACHE.replace("x_hat.astype", "centred.astype")),
    also=[edit(CACHE, CACHE.replace("x_hat.astype", "wide.astype"))],
)
def another_array_for_x_hat(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0, spread=20.0), "dx", "dgamma")


@trap(
    catches="the cache holds x_hat, or 1 / √(var + eps), in half precision",
    severity="major",
    story="Half of the bytes, and three digits of every gradient.",
    mutant=edit(CACHE, CACHE.replace("x_hat.astype(x.dtype)", "x_hat.astype(np.float16)")),
    also=[edit(CACHE, CACHE.replace("rstd.astype(x.dtype)", "rstd.astype(np.float16)"))],
)
def cache_in_half_precision(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng), "dx", "dgamma")


# --- dx -------------------------------------------------------------------------------------------


@trap(
    catches="dx is multiplied by gamma twice",
    severity="major",
    story="dy · gamma is computed once, and gamma applied again on the way out or in.",
    mutant=edit(G, "    g = dy * gamma * gamma\n"),
    also=[edit(DX, DX.replace("dx = ", "dx = gamma * "))],
)
def gamma_twice_in_dx(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng), "dx")


@trap(
    catches="dy is divided by gamma where it is to be multiplied",
    severity="major",
    story="The gradient is to undo the scaling of the output, so it seems.",
    mutant=edit(G, "    g = dy / gamma\n"),
)
def dy_divided_by_gamma(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng), "dx")


@trap(
    catches="dx is computed with the magnitude, the mean or one element of gamma",
    severity="major",
    story="Invisible while gamma is 1, which it is at the start of training.",
    mutant=edit(G, "    g = dy * np.mean(gamma)\n"),
    also=[edit(G, f"    g = dy * {of_gamma}\n") for of_gamma in ("gamma[0]", "np.abs(gamma)")],
    control=ordinary_rows,
)
def another_gamma_in_dx(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    p.gamma[1] = -1.5
    check_gradients(submission, p, "dx")


@trap(
    catches="mean(g · x_hat) is one number for the whole array, or taken over positions or the "
    "batch alone",
    severity="major",
    story="A reduction without `axis`, or along the wrong one.",
    mutant=edit(MEAN_GX, "mean_gx = np.sum(g * x_hat) / max(g.size, 1)"),
    also=[
        edit(
            MEAN_GX,
            f"mean_gx = np.sum(g * x_hat, axis={axis}, keepdims=True) / max(g.shape[{axis}], 1)",
        )
        for axis in (1, 0)
    ],
)
def projection_over_another_axis(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="a mean in dx is divided by D − 1 instead of D",
    severity="major",
    story="The divisor of an unbiased variance strays into the backward pass.",
    mutant=edits(_GX_LESS),
    also=[edits(_MEAN_LESS), edits(_MEAN_LESS, _GX_LESS)],
)
def means_over_one_less(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0, along=1.0), "dx")


@trap(
    catches="the variance term of dx is not x_hat · mean(g · x_hat): x_hat stands once more in it, "
    "or g is missing",
    severity="major",
    story="x_hat stands before the mean and inside it, and it is squared in the wrong place.",
    mutant=edit(MEAN_GX, _OTHER_GX.format(product="g * x_hat * x_hat")),
    also=[
        edit(MEAN_GX, _OTHER_GX.format(product="(g - mean_g) * x_hat * x_hat")),
        edit(MEAN_GX, _OTHER_GX.format(product="x_hat * x_hat")),
        edit(DX, DX.replace("x_hat * mean_gx", "x_hat * x_hat * mean_gx")),
    ],
)
def projection_of_another_product(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="the variance term of dx is multiplied by 1 / √(var + eps) more than once",
    severity="major",
    story="The factor of dvar stays, although x_hat and the front of dx hold it already.",
    mutant=edit(DX, DX.replace("x_hat * mean_gx", f"x_hat * mean_gx * {_ROW}")),
    also=[edit(DX, DX.replace("x_hat * mean_gx", f"x_hat * mean_gx * {_ROW} ** 2.0"))],
)
def projection_with_rstd_again(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0, spread=20.0), "dx")


@trap(
    catches="the mean terms of dx are not multiplied by 1 / √(var + eps): the mean of g, or both",
    severity="major",
    story="A bracket ends too early.",
    mutant=edit(DX, f"dx = {_ROW} * (g - x_hat * mean_gx) - mean_g"),
    also=[edit(DX, f"dx = {_ROW} * g - mean_g - x_hat * mean_gx")],
)
def mean_term_without_rstd(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, mean=1.0, along=1.0, spread=20.0), "dx")


@trap(
    catches="g · mean(g · x_hat), or (g − mean(g)) · mean(g · x_hat), where "
    "x_hat · mean(g · x_hat) belongs",
    severity="major",
    story="A factor is taken for another one of the same shape.",
    mutant=edit(DX, DX.replace("x_hat * mean_gx", "g * mean_gx")),
    also=[edit(DX, DX.replace("x_hat * mean_gx", "(g - mean_g) * mean_gx"))],
)
def projection_along_g(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng, along=1.0), "dx")


@trap(
    catches="dx is divided by the number of batch entries, rows or elements, as if the loss were a "
    "mean",
    severity="major",
    story="The mean of a loss over its batch belongs to dy.",
    mutant=edit(DX, DX + " / max(len(dy), 1)"),
    also=[
        edit(DX, f"{DX} / max({count}, 1)") for count in ("dy.shape[0] * dy.shape[1]", "dy.size")
    ],
)
def dx_averaged(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, split(rng), "dx")


@trap(
    catches="dx of a row is scaled with 1 / √(var + eps) of another row",
    severity="major",
    story="The first row, or the mean or largest of a sequence, stands for all.",
    mutant=edit(DX, DX.replace(_ROW, "rstd[:, :1, None]")),
    also=[
        edit(DX, DX.replace(_ROW, "rstd[:1, :, None]")),
        edit(DX, DX.replace(_ROW, "(np.sum(rstd) / max(rstd.size, 1))")),
        edit(DX, DX.replace(_ROW, "np.max(rstd, axis=1, initial=0.0)[:, None, None]")),
    ],
    control=ordinary_rows,
)
def rstd_of_another_row(submission: Submission, rng: Rng) -> None:
    p = split(rng)
    check_gradients(submission, p._replace(x=p.x * np.arange(1.0, 7.0).reshape(2, 3, 1)), "dx")


# --- dgamma and dbeta -----------------------------------------------------------------------------


@trap(
    catches="dbeta as Σ dy / √(var + eps): the deviation does not belong there",
    severity="major",
    story="The factor of dx is applied to dy before dbeta is taken of it.",
    mutant=edit(DBETA, f"dbeta = np.sum(dy * {_ROW}, axis=(0, 1))"),
)
def dbeta_with_rstd(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, spread=20.0), "dbeta")


@trap(
    catches="dbeta or dgamma is summed over a dy whose row means are subtracted",
    severity="major",
    story="dy is centred for dx, and the sums come after that.",
    mutant=edit(DBETA, "dbeta = np.sum(dy - np.mean(dy, axis=-1, keepdims=True), axis=(0, 1))"),
    also=[
        edit(
            DGAMMA,
            "dgamma = np.sum((dy - np.mean(dy, axis=-1, keepdims=True)) * x_hat, axis=(0, 1))",
        )
    ],
)
def sums_of_centred_dy(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng), "dgamma", "dbeta")


@trap(
    catches="dgamma or dbeta is summed over the features, too: one number for all of them",
    severity="major",
    story="A reduction without `axis`.",
    mutant=edit(DBETA, "dbeta = np.full(gamma.shape, np.sum(dy))"),
    also=[
        edit(DGAMMA, "dgamma = np.full(gamma.shape, np.sum(dy * x_hat))"),
        edits(
            (DBETA, "dbeta = np.full(gamma.shape, np.sum(dy))"),
            (DGAMMA, "dgamma = np.full(gamma.shape, np.sum(dy * x_hat))"),
        ),
    ],
)
def sums_over_features_too(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng), "dgamma", "dbeta")


@trap(
    catches="dgamma or dbeta without dy: Σ x_hat, or the number of rows",
    severity="major",
    story="The derivative of y stands for that of Σ dy · y.",
    mutant=edit(DGAMMA, "dgamma = np.sum(x_hat, axis=(0, 1))"),
    also=[edit(DBETA, "dbeta = np.full(gamma.shape, float(dy.shape[0] * dy.shape[1]))")],
)
def sums_without_dy(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng), "dgamma", "dbeta")


@trap(
    catches="dgamma as Σ dy · Σ x_hat: both are summed before they are multiplied",
    severity="major",
    story="A sum of products is taken for a product of sums.",
    mutant=edit(DGAMMA, "dgamma = np.sum(dy, axis=(0, 1)) * np.sum(x_hat, axis=(0, 1))"),
)
def dgamma_of_two_sums(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng), "dgamma")


@trap(
    catches="dgamma or dbeta loses the sign of dy: magnitudes are summed",
    severity="major",
    story="A norm of the gradient is accumulated in its place.",
    mutant=edit(DBETA, "dbeta = np.sum(np.abs(dy), axis=(0, 1))"),
    also=[edit(DGAMMA, "dgamma = np.sum(np.abs(dy * x_hat), axis=(0, 1))")],
)
def sums_of_magnitudes(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng), "dgamma", "dbeta")
