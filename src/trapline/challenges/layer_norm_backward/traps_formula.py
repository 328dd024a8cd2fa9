"""Bugs of the backward formula and of the cache it reads."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import (
    Rng,
    cache_parts,
    check_both,
    check_cache_size,
    check_forward,
    check_grads,
    forward,
    problem,
    three,
)
from trapline.challenges.layer_norm_backward.situations import plain
from trapline.challenges.layer_norm_backward.solution_lines import DX, STEP, G, Y

# Parts of the gold solution that several mutants edit.
_CACHE = "(x_hat.astype(x.dtype), rstd.astype(x.dtype), gamma.copy())"
_UNPACK = "x_hat, rstd, gamma = cache\n"
_MEAN_GX = "mean_gx = np.mean(g * x_hat, axis=-1, keepdims=True)"
_DGAMMA = "dgamma = np.sum(dy * x_hat, axis=(0, 1))"

# --- the backward formula -------------------------------------------------------------------------


@trap(
    catches="dx computed from dy instead of dy · gamma",
    severity="critical",
    story="Invisible with gamma = 1, which is how gamma is initialised and how most tests call it.",
    mutant=edit(G, "    g = dy\n"),
)
def gamma_missing_in_dx(submission: Submission, rng: Rng) -> None:
    check_both(submission, problem(rng))


@trap(
    catches="dx without − mean(g): the path through the mean is forgotten",
    severity="critical",
    story="The mean is treated as a constant; training still goes down, more slowly.",
    mutant=edit(DX, "dx = rstd[..., None] * (g - x_hat * mean_gx)"),
)
def mean_term_missing(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    check_both(submission, p._replace(dy=np.abs(p.dy)))


@trap(
    catches="dx without − x_hat · mean(g · x_hat): the path through the variance is forgotten",
    severity="critical",
    story="The variance is treated as a constant; the gradient keeps a component along x_hat.",
    mutant=edit(DX, "dx = rstd[..., None] * (g - mean_g)"),
)
def variance_term_missing(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    x_hat = (p.x - p.x.mean(-1, keepdims=True)) / p.x.std(-1, keepdims=True)
    check_both(submission, p._replace(dy=x_hat))


@trap(
    catches="dx with + x_hat · mean(g · x_hat)",
    severity="critical",
    story="A sign lost between −1/2 · var^(−3/2) and the final formula.",
    mutant=edit(DX, "dx = rstd[..., None] * (g - mean_g + x_hat * mean_gx)"),
)
def variance_term_sign(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    x_hat = (p.x - p.x.mean(-1, keepdims=True)) / p.x.std(-1, keepdims=True)
    check_both(submission, p._replace(dy=x_hat))


@trap(
    catches="mean(dy · x_hat) where mean(dy · gamma · x_hat) belongs",
    severity="critical",
    story="dgamma needs dy · x_hat and dx needs g · x_hat; one product is reused for both.",
    mutant=edit(_MEAN_GX, _MEAN_GX.replace("g * x_hat", "dy * x_hat")),
)
def projection_of_dy(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    x_hat = (p.x - p.x.mean(-1, keepdims=True)) / p.x.std(-1, keepdims=True)
    check_both(submission, p._replace(dy=x_hat, gamma=p.gamma + 3.0))


@trap(
    catches="dx not multiplied by 1 / √(var + eps)",
    severity="critical",
    story="Invisible on standard normal inputs, where the factor is close to 1.",
    mutant=edit(DX, "dx = g - mean_g - x_hat * mean_gx"),
)
def rstd_missing(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=20.0))


@trap(
    catches="row means divided by T instead of D",
    severity="critical",
    story="`shape[1]` is the width of a matrix and the length of a batch of sequences.",
    mutant=edit(_MEAN_GX, "mean_gx = np.sum(g * x_hat, axis=-1, keepdims=True) / dy.shape[1]"),
)
def divided_by_the_wrong_length(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 12)))


@trap(
    catches="(B, T) statistics broadcast along features: no error when T = D, only wrong numbers",
    severity="critical",
    story="A forgotten keepdims raises for most shapes and is silent for square ones.",
    mutant=edit(DX, "dx = rstd[:, None, :] * (g - mean_g - x_hat * mean_gx)"),
)
def square_sequence(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 5, 5))
    check_both(submission, p._replace(x=p.x * np.arange(1.0, 6.0)[:, None]))


@trap(
    catches="gamma · (x_hat + beta) instead of gamma · x_hat + beta",
    severity="critical",
    story="Invisible while beta is 0 or gamma is 1, which both are at the start of training.",
    mutant=edit(Y, "y = gamma * (x_hat + beta)"),
)
def beta_scaled(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    check_forward(forward(submission, p)[0], p)


@trap(
    catches="dgamma summed over the batch only",
    severity="critical",
    story="Code written for two axes (N, D) is used with three (B, T, D).",
    mutant=edit(_DGAMMA, "dgamma = np.sum(dy * x_hat, axis=0)"),
)
def dgamma_over_one_axis(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (3, 2, 4)))


@trap(
    catches="dgamma averaged over rows instead of summed",
    severity="critical",
    story="A mean belongs to the loss, not to the layer: the learning rate changes with B · T.",
    mutant=edit(_DGAMMA, "dgamma = np.mean(dy * x_hat, axis=(0, 1))"),
)
def dgamma_averaged(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 4)))


@trap(
    catches="dbeta summed over dy · gamma",
    severity="critical",
    story="The product g = dy · gamma is used for all three gradients.",
    mutant=edit("dbeta = np.sum(dy, axis=(0, 1))", "dbeta = np.sum(dy * gamma, axis=(0, 1))"),
)
def dbeta_scaled(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 4))
    _, cache = forward(submission, p)
    check_grads(submission.layer_norm_backward(p.dy, cache), p, only=("dbeta",))


@trap(
    catches="dgamma as Σ dy · y instead of Σ dy · x_hat",
    severity="critical",
    story="The output is cached instead of the normalised input; both are equal while gamma = 1 "
    "and beta = 0.",
    mutant=edits(
        (_CACHE, _CACHE.replace(", gamma", ", beta.copy(), gamma")),
        (_UNPACK, "x_hat, rstd, beta, gamma = cache\n"),
        (_DGAMMA, "dgamma = np.sum(dy * (gamma * x_hat + beta), axis=(0, 1))"),
    ),
)
def dgamma_from_output(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 4)))


@trap(
    catches="x_hat rebuilt as (y − beta) / gamma, which is 0 / 0 where gamma is 0",
    severity="critical",
    story="'Memory-efficient' modes rebuild x_hat from y and cannot where a weight is zero.",
    mutant=edits(
        (_CACHE, "(y.astype(x.dtype), rstd.astype(x.dtype), gamma.copy(), beta.copy())"),
        (_UNPACK, "y, rstd, gamma, beta = cache\n    x_hat = (y - beta) / gamma\n"),
    ),
)
def zero_gamma(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 6))
    p.gamma[rng.integers(6)] = 0.0
    y, cache = forward(submission, p)
    check_forward(y, p)
    grads = three(submission.layer_norm_backward(p.dy, cache))
    check_grads(grads, p, only=("dgamma", "dbeta"))
    expect.that(bool(np.all(np.isfinite(grads[0]))), "dx is not finite")


# --- the cache ------------------------------------------------------------------------------------


@trap(
    catches="x, or x − mean, kept beside x_hat",
    severity="major",
    story="A graded answer cached twelve things, nine of them redundant, x itself among them.",
    mutant=edits(
        (_CACHE, _CACHE.replace("gamma.copy()", "gamma.copy(), x.copy()")),
        (_UNPACK, "x_hat, rstd, gamma, _ = cache\n"),
    ),
)
def bloated_cache(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        p = problem(rng, (2, 8, 64), dtype)
        check_cache_size(forward(submission, p)[1], p)


@trap(
    catches="a float64 x_hat kept for float32 inputs: twice the bytes",
    severity="major",
    story="Statistics in float64 are right; activations kept in float64 take twice the memory.",
    mutant=edit(_CACHE, "(x_hat, rstd, gamma.copy())"),
)
def cache_in_double(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 8, 64), np.float32)
    for part in cache_parts(forward(submission, p)[1]):
        if isinstance(part, np.ndarray) and part.size >= p.x.size:
            expect.that(part.itemsize <= 4, f"the cache holds {part.dtype}{list(part.shape)}")


@trap(
    catches="statistics broadcast to the full shape before they are kept",
    severity="major",
    story="std kept as (B, T, D): the same number D times.",
    mutant=edits(
        (
            _CACHE,
            _CACHE.replace("rstd.astype", "np.repeat(rstd[..., None], x.shape[-1], -1).astype"),
        ),
        (_UNPACK, "x_hat, rstd, gamma = cache\n    rstd = rstd[..., 0]\n"),
    ),
)
def cache_of_row_copies(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (4, 8, 32))
    for part in cache_parts(forward(submission, p)[1]):
        if isinstance(part, np.ndarray) and part.shape == p.x.shape:
            repeated = bool(np.all(part == part[..., :1]))
            expect.that(not repeated, "the cache holds one number a row, D times")


@trap(
    catches="backward reads what the latest forward left in a global",
    severity="critical",
    story="A layer object keeps its cache as an attribute; the second use of the layer replaces "
    "it.",
    mutant=edits(
        (STEP, STEP + "\nLATEST = []"),
        (Y, Y + f"\n    LATEST[:] = {_CACHE}"),
        (_UNPACK, "x_hat, rstd, gamma = LATEST or cache\n"),
    ),
)
def last_forward_wins(submission: Submission, rng: Rng) -> None:
    first, second = plain(rng), plain(rng)
    _, cache = forward(submission, first)
    forward(submission, second)
    check_grads(submission.layer_norm_backward(first.dy, cache), first)


@trap(
    catches="the cache is a number under which the real one is kept in the process",
    severity="critical",
    story="Hidden state passes a size limit on the cache and every test in one process.",
    mutant=edits(
        (STEP, STEP + "\nKEPT = {}"),
        (Y, Y + f"\n    KEPT[len(KEPT)] = {_CACHE}"),
        (f"return y.astype(x.dtype), {_CACHE}", "return y.astype(x.dtype), (len(KEPT) - 1,)"),
        (_UNPACK, "x_hat, rstd, gamma = KEPT[cache[0]]\n"),
    ),
)
def cache_is_a_key(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    cache_parts(cache)
    check_grads(submission.fresh().layer_norm_backward(p.dy, cache), p)


@trap(
    catches="the cache is an instance of a class: it cannot be saved or sent",
    severity="major",
    story="Activation checkpointing and pipeline stages move caches between processes.",
    mutant=edits(
        (STEP, STEP + "\n\n\nclass Cache:\n    pass"),
        (Y, Y + f"\n    cache = Cache()\n    cache.parts = {_CACHE}"),
        (f"return y.astype(x.dtype), {_CACHE}", "return y.astype(x.dtype), cache"),
        (_UNPACK, "x_hat, rstd, gamma = cache.parts\n"),
    ),
)
def cache_is_an_object(submission: Submission, rng: Rng) -> None:
    cache_parts(forward(submission, plain(rng))[1])


@trap(
    catches="containers inside the cache",
    severity="minor",
    story="The contract asks for a flat cache; code that saves it does not expect a tuple of "
    "tuples.",
    mutant=edits(
        (_CACHE, "((x_hat.astype(x.dtype), rstd.astype(x.dtype)), gamma.copy())"),
        (_UNPACK, "(x_hat, rstd), gamma = cache\n"),
    ),
)
def nested_cache(submission: Submission, rng: Rng) -> None:
    cache_parts(forward(submission, plain(rng))[1])


@trap(
    catches="y computed in place in the array that the cache keeps as x_hat",
    severity="critical",
    story="Scaling and shifting in place saves one temporary and changes the cached activations.",
    mutant=edit(Y, "y = x_hat\n    y *= gamma\n    y += beta"),
)
def output_overwrites_cache(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng))
