"""Bugs of single factors: the slope of the softmax, what a product is formed with, the weights."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.solution_lines import DSCORES, UNBOUNDED, WEIGHTS
from trapline.challenges.flash_attention_forward.cases import Shape

_DK = "dscores.T @ q[b, h, rows]"
_DQ = "dscores @ k[b, g, cols]"
_DV = "weights.T @ dout[b, h, rows]"
_CENTRED = "(dweights - delta[b, h, rows, None])"
_DELTA = "(dout * out).sum(axis=-1)"


def _one_head(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False), tile=4)


# --- the softmax's derivative ---------------------------------------------------------------------


@trap(
    catches="D is added to dP instead of subtracted from it",
    severity="major",
    story="dv is right, and with a D of 0 so is the rest.",
    mutant=edit(DSCORES, DSCORES.replace("- delta", "+ delta")),
)
def delta_added(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="the softmax is differentiated as if each weight depended on its own score alone: "
    "P·(1 − P)",
    severity="major",
    story="That is the slope of a logistic function; the Jacobian of the softmax has entries off "
    "its diagonal.",
    mutant=edit(DSCORES, "dscores = weights * (1 - weights) * dweights * D**-0.5"),
    also=[edit(DSCORES, f"dscores = weights * (1 - weights) * {_CENTRED} * D**-0.5")],
)
def slope_of_each_weight_alone(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="the factor P of the softmax's derivative stands twice, before all or before D",
    severity="major",
    story="dS = P·(dP − D); in P·dP − P·D each part has it once.",
    mutant=edit(DSCORES, f"dscores = weights**2 * {_CENTRED} * D**-0.5"),
    also=[
        edit(
            DSCORES,
            "dscores = weights * (dweights - weights * delta[b, h, rows, None]) * D**-0.5",
        )
    ],
)
def weights_twice_in_the_slope(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="the scale D^-½ is applied to dP or to D alone, instead of to their difference",
    severity="major",
    story="A bracket in the wrong place, or a D that was made of scaled gradients.",
    mutant=edit(DSCORES, "dscores = weights * (dweights * D**-0.5 - delta[b, h, rows, None])"),
    also=[
        edit(DSCORES, "dscores = weights * (dweights - delta[b, h, rows, None] * D**-0.5)"),
        edit(f"delta = {_DELTA}", f"delta = {_DELTA} * D**-0.5"),
        edit(DSCORES, DSCORES.replace("(dweights -", "(dweights * D**-0.5 -")),
    ],
)
def scale_of_one_part(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="dq and dk have another factor than D^-½, 1/D or √D, though the scores are right",
    severity="major",
    story="The factor of the formula comes on top of a scaled q, or its sign is lost.",
    mutant=edit(DSCORES, DSCORES.replace("D**-0.5", "D**-1.0")),
    also=[edit(DSCORES, DSCORES.replace("D**-0.5", "D**0.5"))],
)
def dscores_of_another_scale(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    catches="the gradient of the scores is that of the weights: the factor P of the softmax's "
    "derivative is missing",
    severity="major",
    story="dP is passed on as if the softmax were not there, or only its mean is taken off.",
    mutant=edit(DSCORES, "dscores = dweights * D**-0.5"),
    also=[edit(DSCORES, f"dscores = {_CENTRED} * D**-0.5")],
)
def softmax_not_differentiated(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="D is one number for all rows, or for all rows of a head, instead of one for each row",
    severity="major",
    story="A sum without an axis broadcasts without a word.",
    mutant=edit(_DELTA, "np.broadcast_to((dout * out).sum(), (B, H, T))"),
    also=[
        edit(
            _DELTA,
            "np.broadcast_to((dout * out).sum(axis=(-2, -1), keepdims=True)[..., 0], (B, H, T))",
        )
    ],
)
def delta_of_all_rows(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


# --- a factor taken for another -------------------------------------------------------------------


@trap(
    catches="dv is formed with out instead of dout",
    severity="major",
    story="Both arrays have the same shape, so that nothing complains.",
    mutant=edit(_DV, _DV.replace("dout", "out")),
)
def dv_from_out(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="dv is formed with the gradient of the weights, dP, instead of the weights",
    severity="major",
    story="Both matrices have the same shape, so that nothing complains.",
    mutant=edit(_DV, "dweights.T @ dout[b, h, rows]"),
    also=[edit(_DV, "(weights * dweights).T @ dout[b, h, rows]")],
)
def dv_from_dweights(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="the gradient of the weights is formed with out instead of dout",
    severity="major",
    story="Both arrays have the same shape, so that nothing complains.",
    mutant=edit("dout[b, h, rows] @ v[b, g, cols].T", "out[b, h, rows] @ v[b, g, cols].T"),
)
def dweights_from_out(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="dk is formed with the weights instead of the gradient of the scores",
    severity="major",
    story="dv = Pᵀ·dO is written first, and dk = dSᵀ·Q is copied from it.",
    mutant=edit(_DK, "weights.T @ q[b, h, rows]"),
    also=[edit(_DK, "weights.T @ q[b, h, rows] * D**-0.5")],
)
def dk_from_the_weights(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="dq is formed with the weights instead of the gradient of the scores",
    severity="major",
    story="Both matrices have the same shape, so that nothing complains.",
    mutant=edit(_DQ, "weights @ k[b, g, cols]"),
    also=[edit(_DQ, "weights @ k[b, g, cols] * D**-0.5")],
)
def dq_from_the_weights(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


# --- the weights made again -----------------------------------------------------------------------


_ONCE_SCALED = "    scores = q @ k[cols].T * D**-0.5"


@trap(
    catches="the backward pass makes its scores with another scale than the forward one: 1/D or √D",
    severity="major",
    story="The forward pass is right, and the scores that are made again do not fit its lse.",
    mutant=edit(_ONCE_SCALED, "    scores = q @ k[cols].T / D"),
    also=[
        edits((_ONCE_SCALED, "    scores = q @ k[cols].T / D"), UNBOUNDED),
        edits((_ONCE_SCALED, "    scores = q @ k[cols].T * D**0.5"), UNBOUNDED),
        edit(_ONCE_SCALED, "    scores = q @ k[cols].T * D**0.5"),
    ],
)
def scores_of_another_scale(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


@trap(
    catches="the recomputed weights are the exponentials of the scores alone: lse is not "
    "subtracted",
    severity="major",
    story="The weights of the formula are exp(s − lse), and exp(s) has their shape.",
    mutant=edit(WEIGHTS, "return np.exp(scores)"),
    also=[edit(WEIGHTS, "return np.exp(np.minimum(scores, 0))")],
)
def weights_without_lse(submission: Submission, rng: np.random.Generator) -> None:
    _one_head(submission, rng)


def one_tile_of_keys(submission: Submission, rng: np.random.Generator) -> None:
    """The tile holds all keys."""
    differentiates(submission, draw(Shape(T=5, S=9), rng, False), tile=16)


def _normalised(peak: str, total: str) -> str:
    return (
        f"weights = np.exp(scores - {peak})\n"
        "    total = weights.sum(axis=1, keepdims=True)\n"
        f"    return weights / {total}"
    )


_PEAK, _GUARDED = "scores.max(axis=1, keepdims=True)", "np.where(total > 0, total, 1)"


@trap(
    catches="the recomputed weights are normalised within each tile of keys instead of by lse",
    severity="major",
    story="The softmax of a tile is the softmax of a row only where one tile holds all keys.",
    mutant=edit(WEIGHTS, _normalised(_PEAK, "total")),
    also=[
        edit(WEIGHTS, _normalised(f"np.maximum({_PEAK}, -1e300)", _GUARDED)),
        edit(WEIGHTS, _normalised("finite[:, None]", "total")),
    ],
    control=one_tile_of_keys,
)
def weights_normalised_in_each_tile(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=5, S=9), rng, False), tile=4)
