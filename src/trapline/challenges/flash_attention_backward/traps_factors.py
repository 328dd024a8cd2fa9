"""Bugs of single factors: the slope of the softmax, what a product is formed with, the weights."""

import numpy as np

from trapline.arena.judge.traps import edit, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.solution_lines import DSCORES, WEIGHTS
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
