"""Bugs of the cache."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import (
    Rng,
    cache_parts,
    check_cache_size,
    check_grads,
    forward,
    problem,
)
from trapline.challenges.layer_norm_backward.situations import (
    WRITTEN_BLIND,
    check_gradients,
    ordinary_float32,
    plain,
)
from trapline.challenges.layer_norm_backward.solution_lines import (
    CACHE,
    CENTRED,
    STEP,
    UNPACK,
    VAR,
    X_HAT,
    Y,
)


@trap(
    catches="x, x − mean or y kept beside the array that the backward pass needs",
    severity="major",
    story="A published answer kept several times the arrays that the backward pass needs.",
    seen="a published answer",
    mutant=edits(
        (CACHE, CACHE.replace("gamma.copy()", "gamma.copy(), x.copy()")),
        (UNPACK, "x_hat, rstd, gamma, _ = cache\n"),
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
    mutant=edit(CACHE, "(x_hat, rstd, gamma.copy())"),
    seen=WRITTEN_BLIND,
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
            CACHE,
            CACHE.replace("rstd.astype", "np.repeat(rstd[..., None], x.shape[-1], -1).astype"),
        ),
        (UNPACK, "x_hat, rstd, gamma = cache\n    rstd = rstd[..., 0]\n"),
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
    severity="major",
    story="A layer object keeps its cache as an attribute; the second use of the layer replaces "
    "it.",
    mutant=edits(
        (STEP, STEP + "\nLATEST = []"),
        (Y, Y + f"\n    LATEST[:] = {CACHE}"),
        (UNPACK, "x_hat, rstd, gamma = LATEST or cache\n"),
    ),
    seen=WRITTEN_BLIND,
)
def last_forward_wins(submission: Submission, rng: Rng) -> None:
    first, second = plain(rng), plain(rng)
    _, cache = forward(submission, first)
    forward(submission, second)
    check_grads(submission.layer_norm_backward(first.dy, cache), first)


@trap(
    catches="the cache is a number under which the real one is kept in the process",
    severity="major",
    story="Hidden state passes a size limit on the cache and every test in one process.",
    mutant=edits(
        (STEP, STEP + "\nKEPT = {}"),
        (Y, Y + f"\n    KEPT[len(KEPT)] = {CACHE}"),
        (f"return y.astype(x.dtype), {CACHE}", "return y.astype(x.dtype), (len(KEPT) - 1,)"),
        (UNPACK, "x_hat, rstd, gamma = KEPT[cache[0]]\n"),
    ),
)
def cache_is_a_key(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    cache_parts(cache)
    check_grads(submission.clean().layer_norm_backward(p.dy, cache), p)


@trap(
    catches="the cache is an instance of a class: it cannot be saved or sent",
    severity="major",
    story="Activation checkpointing and pipeline stages move caches between processes.",
    mutant=edits(
        (STEP, STEP + "\n\n\nclass Cache:\n    pass"),
        (Y, Y + f"\n    cache = Cache()\n    cache.parts = {CACHE}"),
        (f"return y.astype(x.dtype), {CACHE}", "return y.astype(x.dtype), cache"),
        (UNPACK, "x_hat, rstd, gamma = cache.parts\n"),
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
        (CACHE, "((x_hat.astype(x.dtype), rstd.astype(x.dtype)), gamma.copy())"),
        (UNPACK, "(x_hat, rstd), gamma = cache\n"),
    ),
    seen=WRITTEN_BLIND,
)
def nested_cache(submission: Submission, rng: Rng) -> None:
    cache_parts(forward(submission, plain(rng))[1])


@trap(
    catches="y computed in place in the array that the cache keeps as x_hat",
    severity="major",
    story="Scaling and shifting in place saves one temporary and changes the cached activations.",
    mutant=edit(Y, "y = x_hat\n    y *= gamma\n    y += beta"),
)
def output_overwrites_cache(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng), "dx", "dgamma")


@trap(
    catches="the variance kept in the cache in float32: for rows of 1e25 it is infinite",
    severity="major",
    story="The forward pass computes in float64 and is right; what it keeps overflows.",
    mutant=edits(
        (CACHE, CACHE.replace("rstd.astype", "(1.0 / rstd**2.0).astype")),
        (
            UNPACK,
            "x_hat, var, gamma = cache\n"
            "    rstd = 1.0 / np.sqrt(var.astype(np.float64))\n"
            "    x_hat = np.where(rstd[..., None] > 0.0, x_hat, np.nan)\n",
        ),
    ),
    also=[
        # x_hat is right, so that dx alone becomes 0.
        edits(
            (CACHE, CACHE.replace("rstd.astype", "(1.0 / rstd**2.0).astype")),
            (UNPACK, "x_hat, var, gamma = cache\n    rstd = var.astype(np.float64) ** -0.5\n"),
        ),
        # x_hat is made again from x: dx and dgamma become 0.
        edits(
            (CACHE, "(x.copy(), var.astype(x.dtype), eps, gamma.copy())"),
            (
                UNPACK,
                "x, var, eps, gamma = cache\n"
                "    rstd = 1.0 / np.sqrt(var.astype(np.float64) + eps)\n"
                "    wide = x.astype(np.float64)\n"
                f"    {CENTRED}\n"
                f"    {X_HAT}\n",
            ),
        ),
    ],
    seen=WRITTEN_BLIND,
    control=ordinary_float32,
)
def variance_cached_in_float32(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 8), np.float32, spread=1e25), "dx", "dgamma")


def _x_itself(gamma: str) -> Mutant:
    """The cache holds the caller's x, and backward computes the statistics anew."""
    return edits(
        (CACHE, f"(x, eps, {gamma})"),
        (
            UNPACK,
            "x, eps, gamma = cache\n"
            "    wide = x.astype(np.float64)\n"
            f"    {CENTRED}\n"
            f"    {VAR}\n"
            "    rstd = 1.0 / np.sqrt(var + eps)\n"
            f"    {X_HAT}\n",
        ),
    )


@trap(
    catches="the cache holds the caller's own array instead of a copy",
    severity="major",
    story="An optimiser that updates gamma in place between the passes changes the gradients.",
    mutant=edit("rstd.astype(x.dtype), gamma.copy())", "rstd.astype(x.dtype), gamma)"),
    also=[_x_itself("gamma.copy()"), _x_itself("gamma")],
    seen="an answer of another author",
)
def cache_aliases_an_input(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 4))
    _, shared = submission.sharing("layer_norm_forward", p.x, p.gamma, p.beta)
    names = [("x", "gamma", "beta")[place] for place in sorted(shared.arguments)]
    expect.that(not names, f"y or the cache lies in the memory of {' and '.join(names)}")
