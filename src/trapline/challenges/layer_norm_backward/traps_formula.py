"""Bugs of the backward formula and of the cache it reads."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
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

# --- the backward formula -------------------------------------------------------------------------


@trap(
    "gamma-missing-in-dx",
    catches="dx computed from dy instead of dy · gamma",
    severity="critical",
    story="Invisible with gamma = 1, which is how gamma is initialised and how most tests call it.",
)
def gamma_missing_in_dx(submission: Submission, rng: Rng) -> None:
    check_both(submission, problem(rng))


@trap(
    "mean-term-missing",
    catches="dx without − mean(g): the path through the mean is forgotten",
    severity="critical",
    story="The mean is treated as a constant; training still goes down, more slowly.",
)
def mean_term_missing(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    check_both(submission, p._replace(dy=np.abs(p.dy)))


@trap(
    "variance-term-missing",
    catches="dx without − x_hat · mean(g · x_hat): the path through the variance is forgotten",
    severity="critical",
    story="The variance is treated as a constant; the gradient keeps a component along x_hat.",
)
def variance_term_missing(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    x_hat = (p.x - p.x.mean(-1, keepdims=True)) / p.x.std(-1, keepdims=True)
    check_both(submission, p._replace(dy=x_hat))


@trap(
    "variance-term-sign",
    catches="dx with + x_hat · mean(g · x_hat)",
    severity="critical",
    story="A sign lost between −1/2 · var^(−3/2) and the final formula.",
)
def variance_term_sign(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    x_hat = (p.x - p.x.mean(-1, keepdims=True)) / p.x.std(-1, keepdims=True)
    check_both(submission, p._replace(dy=x_hat))


@trap(
    "projection-of-dy",
    catches="mean(dy · x_hat) where mean(dy · gamma · x_hat) belongs",
    severity="critical",
    story="dgamma needs dy · x_hat and dx needs g · x_hat; one product was reused for both.",
)
def projection_of_dy(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    x_hat = (p.x - p.x.mean(-1, keepdims=True)) / p.x.std(-1, keepdims=True)
    check_both(submission, p._replace(dy=x_hat, gamma=p.gamma + 3.0))


@trap(
    "rstd-missing",
    catches="dx not multiplied by 1 / √(var + eps)",
    severity="critical",
    story="Invisible on standard normal inputs, where the factor is close to 1.",
)
def rstd_missing(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=20.0))


@trap(
    "divided-by-the-wrong-length",
    catches="row means divided by T instead of D",
    severity="critical",
    story="`shape[1]` is the width of a matrix and the length of a batch of sequences.",
)
def divided_by_the_wrong_length(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 12)))


@trap(
    "square-sequence",
    catches="(B, T) statistics broadcast along features: no error when T = D, only wrong numbers",
    severity="critical",
    story="A forgotten keepdims raises for most shapes and is silent for square ones.",
)
def square_sequence(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 5, 5))
    check_both(submission, p._replace(x=p.x * np.arange(1.0, 6.0)[:, None]))


@trap(
    "beta-scaled",
    catches="gamma · (x_hat + beta) instead of gamma · x_hat + beta",
    severity="critical",
    story="Invisible while beta is 0 or gamma is 1, which both are at the start of training.",
)
def beta_scaled(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    check_forward(forward(submission, p)[0], p)


@trap(
    "dgamma-over-one-axis",
    catches="dgamma summed over the batch only",
    severity="critical",
    story="A two-axis test (N, D) became a three-axis model (B, T, D).",
)
def dgamma_over_one_axis(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (3, 2, 4)))


@trap(
    "dgamma-averaged",
    catches="dgamma averaged over rows instead of summed",
    severity="critical",
    story="A mean belongs to the loss, not to the layer: the learning rate changes with B · T.",
)
def dgamma_averaged(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 4)))


@trap(
    "dbeta-scaled",
    catches="dbeta summed over dy · gamma",
    severity="critical",
    story="The product g = dy · gamma was used for all three gradients.",
)
def dbeta_scaled(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 4))
    _, cache = forward(submission, p)
    check_grads(submission.layer_norm_backward(p.dy, cache), p, only=("dbeta",))


@trap(
    "dgamma-from-output",
    catches="dgamma as Σ dy · y instead of Σ dy · x_hat",
    severity="critical",
    story="The output was cached instead of the normalised input; equal while gamma = 1, beta = 0.",
)
def dgamma_from_output(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 4)))


@trap(
    "zero-gamma",
    catches="x_hat rebuilt as (y − beta) / gamma, which is 0 / 0 where gamma is 0",
    severity="critical",
    story="'Memory-efficient' modes rebuild x_hat from y and lose everything where weights vanish.",
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
    "bloated-cache",
    catches="x, or x − mean, kept beside x_hat",
    severity="major",
    story="A graded answer cached twelve things, nine of them redundant, x itself among them.",
)
def bloated_cache(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        p = problem(rng, (2, 8, 64), dtype)
        check_cache_size(forward(submission, p)[1], p)


@trap(
    "cache-in-double",
    catches="a float64 x_hat kept for float32 inputs: twice the bytes",
    severity="major",
    story="Statistics in double are right, activations kept in double are a doubled memory bill.",
)
def cache_in_double(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 8, 64), np.float32)
    for part in cache_parts(forward(submission, p)[1]):
        if isinstance(part, np.ndarray) and part.size >= p.x.size:
            expect.that(part.itemsize <= 4, f"the cache holds {part.dtype}{list(part.shape)}")


@trap(
    "cache-of-row-copies",
    catches="statistics broadcast to the full shape before they are kept",
    severity="major",
    story="std kept as (B, T, D): the same number D times.",
)
def cache_of_row_copies(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (4, 8, 32))
    for part in cache_parts(forward(submission, p)[1]):
        if isinstance(part, np.ndarray) and part.shape == p.x.shape:
            repeated = bool(np.all(part == part[..., :1]))
            expect.that(not repeated, "the cache holds one number a row, D times")


@trap(
    "last-forward-wins",
    catches="backward that reads what the latest forward left in a global",
    severity="critical",
    story="A layer object kept its cache as an attribute; the second use of the layer replaced it.",
)
def last_forward_wins(submission: Submission, rng: Rng) -> None:
    first, second = plain(rng), plain(rng)
    _, cache = forward(submission, first)
    forward(submission, second)
    check_grads(submission.layer_norm_backward(first.dy, cache), first)


@trap(
    "cache-is-a-key",
    catches="a cache that is a number under which the real one is kept in the process",
    severity="critical",
    story="Hidden state passes a size limit on the cache, and every test in one process.",
)
def cache_is_a_key(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    cache_parts(cache)
    check_grads(submission.fresh().layer_norm_backward(p.dy, cache), p)


@trap(
    "cache-is-an-object",
    catches="a cache that is an instance of a class: it cannot be saved or sent",
    severity="major",
    story="Activation checkpointing and pipeline stages move caches between processes.",
)
def cache_is_an_object(submission: Submission, rng: Rng) -> None:
    cache_parts(forward(submission, plain(rng))[1])


@trap(
    "nested-cache",
    catches="containers inside the cache",
    severity="minor",
    story="A flat cache was asked for; a tuple of tuples broke the code that saved it.",
)
def nested_cache(submission: Submission, rng: Rng) -> None:
    cache_parts(forward(submission, plain(rng))[1])


@trap(
    "output-overwrites-cache",
    catches="y computed in place in the array that the cache keeps as x_hat",
    severity="critical",
    story="An in-place scale and shift saved one temporary and the wrong activations.",
)
def output_overwrites_cache(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng))
