"""Bugs in the handling of inputs."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import (
    REFUSAL,
    Rng,
    cache_parts,
    check_both,
    check_grads,
    forward,
    problem,
)
from trapline.challenges.layer_norm_backward.situations import plain
from trapline.challenges.layer_norm_backward.solution_lines import DX, VAR, G

# Parts of the gold solution that several mutants edit.
_WIDE = "wide = x.astype(np.float64)"
_WIDEN_DY = "    dy = dy.astype(np.float64)\n"


@trap(
    catches="x centred in place",
    severity="critical",
    story="`x -= mean` changes the array that the residual branch still needs.",
    mutant=insert_before(_WIDE, "x -= np.mean(x, axis=-1, keepdims=True)\n    "),
)
def x_modified(submission: Submission, rng: Rng) -> None:
    p = problem(rng, offset=2.0)
    _, after = submission.observe("layer_norm_forward", *p.args)
    for name, left, sent in zip(("x", "gamma", "beta"), after, p.args, strict=False):
        expect.equal(left, sent, f"{name} after the call")


@trap(
    catches="dy multiplied by gamma in place",
    severity="critical",
    story="`dy *= gamma` changes an array that another branch of the graph still needs.",
    mutant=edits(
        (_WIDEN_DY, ""),
        (G, "    dy *= gamma\n    g = dy\n"),
    ),
)
def dy_modified(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _, cache = forward(submission, p)
    _, after = submission.observe("layer_norm_backward", p.dy, cache)
    expect.equal(after[0], p.dy, "dy after the call")


@trap(
    catches="backward uses the cache as a scratch buffer: a second backward differs",
    severity="major",
    story="Retained graphs call backward twice; the second gradient is silently wrong.",
    mutant=edit(
        DX, "x_hat *= mean_gx.astype(dtype)\n    dx = rstd[..., None] * (g - mean_g - x_hat)"
    ),
)
def cache_modified(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    _, after = submission.observe("layer_norm_backward", p.dy, cache)
    before, left = cache_parts(cache), cache_parts(after[1])
    for number, (part, sent) in enumerate(zip(left, before, strict=True)):
        expect.equal(part, sent, f"part {number} of the cache after the call")


@trap(
    catches="everything cast to float32 on the way in",
    severity="critical",
    story="With a float32 path for float64 inputs, gradient checks fail at 1e-3.",
    mutant=edit(_WIDE, _WIDE.replace("float64", "float32")),
)
def float64_computed_in_float32(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16)))


@trap(
    catches="float64 results for float32 inputs",
    severity="major",
    story="One float64 scalar doubles the memory of everything after it.",
    mutant=edit("return y.astype(x.dtype), (", "return y, ("),
)
def float32_widened(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 8), np.float32))


@trap(
    catches="squares of float32 values around 1e25 overflow: y is 0",
    severity="major",
    story="Reported against two frameworks: large activations normalised to zeros.",
    mutant=edit(_WIDE, "wide = x"),
)
def huge_float32(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 8), np.float32, spread=1e25))


@trap(
    catches="the buffer of x read in memory order whatever its strides",
    severity="critical",
    story="Kernels that take a pointer and a width read a transposed view as if it were packed.",
    mutant=edit(_WIDE, _WIDE.replace("x.", "x.ravel(order='K').reshape(x.shape).")),
)
def strided_x(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (3, 4, 6))
    turned = np.ascontiguousarray(p.x.transpose(1, 0, 2)).transpose(1, 0, 2)
    folded = np.asfortranarray(p.x)
    for x in (turned, folded, p.x[::-1, ::2], p.x[:, :, ::-1]):
        dy = np.ascontiguousarray(p.dy[:, : x.shape[1]])
        check_both(submission, p._replace(x=x, dy=dy))


@trap(
    catches="the buffer of dy read in memory order whatever its strides",
    severity="critical",
    story="The gradient of a sum arrives as a broadcast view with stride 0.",
    mutant=edit(_WIDEN_DY, "    dy = dy.ravel(order='K').reshape(dy.shape).astype(np.float64)\n"),
)
def strided_dy(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (3, 4, 6))
    _, cache = forward(submission, p)
    for dy in (
        np.asfortranarray(p.dy),
        np.broadcast_to(p.dy[:1, :1], p.dy.shape),
        p.dy[:, :, ::-1],
    ):
        check_grads(submission.layer_norm_backward(dy, cache), p._replace(dy=dy))


@trap(
    catches="an empty batch crashes, or its dgamma is not D zeros",
    severity="major",
    story="The last shard of a batch can be empty.",
    mutant=edit(_WIDE, _WIDE.replace("x.", "(x / np.max(np.abs(x))).")),
)
def no_rows(submission: Submission, rng: Rng) -> None:
    for shape in ((0, 2, 5), (2, 0, 5)):
        check_both(submission, plain(rng, shape))


@trap(
    catches="axes of length 1 squeezed away",
    severity="major",
    story="`squeeze()` after a reduction also removes a batch axis of length 1.",
    mutant=edit(VAR, VAR.replace("axis=-1)", "axis=-1, keepdims=True).squeeze()")),
)
def batch_of_one(submission: Submission, rng: Rng) -> None:
    for shape in ((1, 3, 4), (3, 1, 4), (1, 1, 4)):
        check_both(submission, plain(rng, shape))


@trap(
    catches="a gamma of length 1 is accepted for any D",
    severity="major",
    story="A checkpoint of another width then loads silently.",
    mutant=edit(
        "gamma.shape != (width,) or beta.shape != (width,)", "gamma.ndim != 1 or beta.ndim != 1"
    ),
)
def gamma_broadcast(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for wrong in (p._replace(gamma=p.gamma[:1]), p._replace(beta=p.beta[:1])):
        expect.raises(REFUSAL, submission.layer_norm_forward, *wrong.args)


@trap(
    catches="a dy of another shape is accepted and broadcast",
    severity="major",
    story="A loss reduced over one axis too many returns a gradient of shape (1, T, D).",
    mutant=edit("if dy.shape != x_hat.shape:", "if dy.ndim > x_hat.ndim:"),
)
def dy_broadcast(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    for wrong in (p.dy[:1], p.dy[:, :, :1], p.dy[0]):
        expect.raises(REFUSAL, submission.layer_norm_backward, wrong, cache)


@trap(
    catches="x of rank 2 or 4 accepted",
    severity="minor",
    story="With the batch axis missing, T is taken for D.",
    mutant=edit("if x.ndim != 3:", "if x.ndim < 1:"),
)
def rank_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for x in (p.x[0], p.x[None]):
        expect.raises(REFUSAL, submission.layer_norm_forward, *p._replace(x=x).args)


@trap(
    catches="integer or complex inputs are computed instead of refused",
    severity="minor",
    story="Token ids are then normalised instead of their embeddings.",
    mutant=edit("if array.dtype not in (np.float32, np.float64):", "if array.dtype == object:"),
)
def integers_accepted(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for dtype in (np.int32, np.complex128):
        x, gamma, beta, dy = (value.astype(dtype) for value in (p.x, p.gamma, p.beta, p.dy))
        expect.raises(REFUSAL, submission.layer_norm_forward, x, gamma, beta)
        _, cache = forward(submission, p)
        expect.raises(REFUSAL, submission.layer_norm_backward, dy, cache)


@trap(
    catches="an epsilon of 0, below 0, infinite or NaN is accepted",
    severity="minor",
    story="A sign error in a configuration file makes NaN of every activation.",
    mutant=edit("if not 0.0 < eps < np.inf:", "if isinstance(eps, str):"),
)
def eps_unchecked(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for eps in (0.0, -1e-5, np.inf, np.nan):
        expect.raises(REFUSAL, submission.layer_norm_forward, *p._replace(eps=eps).args)
