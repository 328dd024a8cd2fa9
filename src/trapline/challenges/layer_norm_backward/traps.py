"""The traps of layer_norm_backward: one named bug each, in the smallest situation that shows it."""

from functools import partial
from typing import Any

import numpy as np

from trapline.arena import expect
from trapline.arena.proxy import Stub, Submission
from trapline.arena.traps import trap
from trapline.challenges.layer_norm_backward.cases import (
    NAMES,
    REFUSAL,
    Array,
    Checked,
    Grads,
    Problem,
    Rng,
    cache_parts,
    check_both,
    check_cache_size,
    check_errors,
    check_forward,
    check_grads,
    forward,
    gradient_errors,
    passes,
    problem,
    scaled,
    three,
)
from trapline.gold.norms import oracle


def plain(rng: Rng, *args: Any, **kwargs: Any) -> Problem:
    """A problem with gamma = 1: a bug in the handling of gamma has traps of its own."""
    p = problem(rng, *args, **kwargs)
    return p._replace(gamma=np.ones_like(p.gamma))


# --- statistics -----------------------------------------------------------------------------------


@trap(
    "mean-1e8",
    catches="variance as E[x²] − E[x]², which cancels when the mean dwarfs the spread",
    severity="critical",
    story="Graded answers showed naive variance 0.000 where 2.000 was right; several libraries"
    " shipped it.",
)
def mean_1e8(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16), offset=1e8))


@trap(
    "float32-mean-4096",
    catches="variance as E[x²] − E[x]² in float32, where an offset of a few thousand is enough",
    severity="critical",
    story="A normalisation kernel returned NaN for activations with a large common offset.",
)
def float32_mean_4096(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16), np.float32, offset=4096.0, spread=0.5))


@trap(
    "constant-row",
    catches="a row without spread divided by its deviation of 0",
    severity="critical",
    story="Padding positions carry constant rows; a missing epsilon made NaN of a whole batch.",
)
def constant_row(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 8))
    p.x[:, 1] = rng.integers(-4, 5)
    p.x[0, 2] = 0.0
    check_both(submission, p)


@trap(
    "one-feature",
    catches="D = 1 treated as a case of its own: normalised it is exactly beta, with dx = 0",
    severity="major",
    story="D = 1 was one of the edge cases that only one graded answer tested.",
)
def one_feature(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 1), offset=3.0))


@trap(
    "eps-outside-the-root",
    catches="1 / (√var + eps) instead of 1 / √(var + eps)",
    severity="major",
    story="Two frameworks place epsilon differently; converted models drifted.",
)
def eps_outside_the_root(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    "eps-as-a-floor",
    catches="max(var, eps) instead of var + eps",
    severity="major",
    story="A clamp looks like the same protection and changes every row of small variance.",
)
def eps_as_a_floor(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, spread=0.3, eps=0.05))


@trap(
    "eps-ignored",
    catches="the default epsilon used whatever the caller passes",
    severity="major",
    story="Configured epsilons of 1e-12 were lost on the way to a kernel with a constant in it.",
)
def eps_ignored(submission: Submission, rng: Rng) -> None:
    for eps in (1e-12, 0.5, 2):
        check_both(submission, plain(rng, spread=0.01, eps=eps))


@trap(
    "unbiased-variance",
    catches="variance divided by D − 1",
    severity="critical",
    story="A tensor library's default is ddof = 1; layer norm's is not.",
)
def unbiased_variance(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 4)))


@trap(
    "rows-share-statistics",
    catches="mean and variance taken over positions too",
    severity="critical",
    story="Normalising over the last two axes passes every test with one position.",
)
def rows_share_statistics(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 4, 6))
    p = p._replace(x=p.x + 5.0 * np.arange(4.0)[:, None])
    check_both(submission, p)


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


# --- inputs ---------------------------------------------------------------------------------------


@trap(
    "x-modified",
    catches="x centred in place",
    severity="critical",
    story="The residual branch still needs x; `x -= mean` corrupted it.",
)
def x_modified(submission: Submission, rng: Rng) -> None:
    p = problem(rng, offset=2.0)
    _, after = submission.observe("layer_norm_forward", *p.args)
    for name, left, sent in zip(("x", "gamma", "beta"), after, p.args, strict=False):
        expect.equal(left, sent, f"{name} after the call")


@trap(
    "dy-modified",
    catches="dy multiplied by gamma in place",
    severity="critical",
    story="`dy *= gamma` and dy was still needed by another branch of the graph.",
)
def dy_modified(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _, cache = forward(submission, p)
    _, after = submission.observe("layer_norm_backward", p.dy, cache)
    expect.equal(after[0], p.dy, "dy after the call")


@trap(
    "cache-modified",
    catches="the cache used as a scratch buffer by backward: a second backward differs",
    severity="major",
    story="Retained graphs call backward twice; the second gradient was silently wrong.",
)
def cache_modified(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    _, after = submission.observe("layer_norm_backward", p.dy, cache)
    before, left = cache_parts(cache), cache_parts(after[1])
    for number, (part, sent) in enumerate(zip(left, before, strict=True)):
        expect.equal(part, sent, f"part {number} of the cache after the call")


@trap(
    "float64-computed-in-float32",
    catches="everything cast to float32 on the way in",
    severity="critical",
    story="A kernel's float32 path served double inputs: gradient checks failed at 1e-3.",
)
def float64_computed_in_float32(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 16)))


@trap(
    "float32-widened",
    catches="float64 results for float32 inputs",
    severity="major",
    story="One Python float scalar in the wrong place doubled the memory of everything after it.",
)
def float32_widened(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 8), np.float32))


@trap(
    "huge-float32",
    catches="squares of float32 values around 1e25 overflow: y is 0",
    severity="major",
    story="Reported against two frameworks: large activations normalised to zeros.",
)
def huge_float32(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 8), np.float32, spread=1e25))


@trap(
    "strided-x",
    catches="the buffer of x read in memory order whatever its strides",
    severity="critical",
    story="Kernels that take a pointer and a width read a transposed view as if it were packed.",
)
def strided_x(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (3, 4, 6))
    turned = np.ascontiguousarray(p.x.transpose(1, 0, 2)).transpose(1, 0, 2)
    folded = np.asfortranarray(p.x)
    for x in (turned, folded, p.x[::-1, ::2], p.x[:, :, ::-1]):
        dy = np.ascontiguousarray(p.dy[:, : x.shape[1]])
        check_both(submission, p._replace(x=x, dy=dy))


@trap(
    "strided-dy",
    catches="the buffer of dy read in memory order whatever its strides",
    severity="critical",
    story="The gradient of a sum arrives as a broadcast view with stride 0.",
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
    "no-rows",
    catches="an empty batch that crashes, or whose dgamma is not D zeros",
    severity="major",
    story="The last shard of a batch was empty and took the job down.",
)
def no_rows(submission: Submission, rng: Rng) -> None:
    for shape in ((0, 2, 5), (2, 0, 5)):
        check_both(submission, plain(rng, shape))


@trap(
    "batch-of-one",
    catches="axes of length 1 squeezed away",
    severity="major",
    story="`squeeze()` after a reduction also removed the batch axis at batch size 1.",
)
def batch_of_one(submission: Submission, rng: Rng) -> None:
    for shape in ((1, 3, 4), (3, 1, 4), (1, 1, 4)):
        check_both(submission, plain(rng, shape))


@trap(
    "gamma-broadcast",
    catches="a gamma of length 1 accepted for any D",
    severity="major",
    story="A checkpoint of another width loaded without a word.",
)
def gamma_broadcast(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for wrong in (p._replace(gamma=p.gamma[:1]), p._replace(beta=p.beta[:1])):
        expect.raises(REFUSAL, partial(submission.layer_norm_forward, *wrong.args))


@trap(
    "dy-broadcast",
    catches="a dy of another shape accepted and broadcast",
    severity="major",
    story="A loss reduced over one axis too many handed back a gradient of shape (1, T, D).",
)
def dy_broadcast(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    for wrong in (p.dy[:1], p.dy[:, :, :1], p.dy[0]):
        expect.raises(REFUSAL, partial(submission.layer_norm_backward, wrong, cache))


@trap(
    "rank-ignored",
    catches="x of rank 2 or 4 accepted",
    severity="minor",
    story="A missing batch axis made D of T.",
)
def rank_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for x in (p.x[0], p.x[None]):
        expect.raises(REFUSAL, partial(submission.layer_norm_forward, *p._replace(x=x).args))


@trap(
    "integers-accepted",
    catches="integer or complex inputs computed instead of refused",
    severity="minor",
    story="Token ids were normalised instead of their embeddings.",
)
def integers_accepted(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for dtype in (np.int32, np.complex128):
        x, gamma, beta, dy = (value.astype(dtype) for value in (p.x, p.gamma, p.beta, p.dy))
        expect.raises(REFUSAL, partial(submission.layer_norm_forward, x, gamma, beta))
        _, cache = forward(submission, p)
        expect.raises(REFUSAL, partial(submission.layer_norm_backward, dy, cache))


@trap(
    "eps-unchecked",
    catches="an epsilon of 0, below 0, infinite or NaN accepted",
    severity="minor",
    story="A configuration file with a sign error trained for a day on NaN.",
)
def eps_unchecked(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for eps in (0.0, -1e-5, np.inf, np.nan):
        expect.raises(REFUSAL, partial(submission.layer_norm_forward, *p._replace(eps=eps).args))


# --- the gradient check ---------------------------------------------------------------------------


@trap(
    "check-needs-every-element",
    catches="one pair of forward calls for every element of x",
    severity="major",
    story="Every graded answer looped over elements in Python and timed out at D = 1024.",
)
def check_needs_every_element(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (4, 16, 8))  # 512 elements
    checked = passes()
    check_errors(gradient_errors(submission, checked, p), None)
    limit = 8 * p.x.shape[-1] + 256
    calls = len(checked.forward.calls)
    expect.that(calls <= limit, f"forward was called {calls} times; {limit} are allowed")


@trap(
    "check-blind-to-length",
    catches="a check by cosine or sign: gradients of the wrong length pass",
    severity="critical",
    story="A missing factor 1/D leaves the direction of the gradient right.",
)
def check_blind_to_length(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    for place, name in enumerate(NAMES):
        spoiled = passes(partial(scaled, place, 1.05))
        check_errors(gradient_errors(submission, spoiled, p), name, low=0.03)


@trap(
    "check-of-a-few-elements",
    catches="a spot check that never looks at most elements",
    severity="critical",
    story="Spot checks at random places were the usual answer to slow loops; an error elsewhere"
    " passes.",
)
def check_of_a_few_elements(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (3, 4, 6))
    for place, name in enumerate(NAMES):
        for element in (0, -1):
            spoiled = passes(partial(_one_element_wrong, place, element))
            check_errors(gradient_errors(submission, spoiled, p), name)


@trap(
    "check-skips-parameters",
    catches="only dx compared; dgamma and dbeta reported as fine",
    severity="critical",
    story="The hard formula got the test, the two easy sums had the bug.",
)
def check_skips_parameters(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    for place, name in ((1, "dgamma"), (2, "dbeta")):
        spoiled = passes(partial(scaled, place, -1.0))
        check_errors(gradient_errors(submission, spoiled, p), name, low=0.5)


@trap(
    "check-of-itself",
    catches="a check that differentiates and propagates with the submission's own passes",
    severity="critical",
    story="The functions under test were ignored in favour of the module's own.",
)
def check_of_itself(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    checked = passes(partial(scaled, 0, 3.0))
    check_errors(gradient_errors(submission, checked, p), "dx", low=0.5)
    expect.that(bool(checked.forward.calls), "gradient_check never called forward")
    expect.that(bool(checked.backward.calls), "gradient_check never called backward")


@trap(
    "check-with-ones",
    catches="dy replaced by ones in the numerical part",
    severity="major",
    story="The loss was sum(y): with gamma = 1 its gradient is 0 and everything passes.",
)
def check_with_ones(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)


@trap(
    "check-absolute",
    catches="an absolute error reported as a relative one",
    severity="major",
    story="With small upstream gradients every backward pass was 'correct to 1e-9'.",
)
def check_absolute(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    for scale in (1e-7, 1e7):
        small = p._replace(dy=p.dy * scale)
        check_errors(gradient_errors(submission, passes(), small), None)
        spoiled = passes(partial(scaled, 0, 2.0))
        errors = gradient_errors(submission, spoiled, small)
        check_errors(errors, "dx", low=0.3)
        expect.that(errors["dx"] < 0.7, f"dx is twice too long, not off by {errors['dx']:.3g}")


@trap(
    "check-of-zero-gradients",
    catches="0 / 0 where a gradient vanishes",
    severity="major",
    story="An upstream gradient of zero is right, and was reported as NaN.",
)
def check_of_zero_gradients(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    nothing = p._replace(dy=np.zeros_like(p.dy))
    check_errors(gradient_errors(submission, passes(), nothing), None)


@trap(
    "check-step-too-large",
    catches="a step so large that the difference's own error hides a wrong gradient",
    severity="major",
    story="With h = 1e-2 every tolerance had to be loosened until wrong gradients fitted in.",
)
def check_step_too_large(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)


@trap(
    "check-step-too-small",
    catches="a step so small that rounding drowns the difference",
    severity="major",
    story="h = 1e-12 'for accuracy': the quotient is rounding noise.",
)
def check_step_too_small(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)


@trap(
    "check-modifies-x",
    catches="x shifted in place and not restored",
    severity="major",
    story="`x[i] += h` inside the check; one answer was praised for working on copies.",
)
def check_modifies_x(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    p.x[..., 0] *= 1e-15  # adding a step and taking it away again does not bring this back
    sent = (p.x, p.gamma, p.beta, p.dy)
    _, after = submission.observe("gradient_check", *passes(), *sent)
    for name, left, original in zip(("x", "gamma", "beta", "dy"), after[2:], sent, strict=True):
        expect.equal(left, original, f"{name} after the check")


@trap(
    "check-of-its-own-forward",
    catches="the backward pass that was given compared with differences of another forward pass",
    severity="major",
    story="The forward pass in the argument list was called once, for its cache, and never again.",
)
def check_of_its_own_forward(submission: Submission, rng: Rng) -> None:
    """A forward pass three times too large: its differences are, and no gradient is right."""
    checked = Checked(Stub(_thrice), passes().backward)
    errors = gradient_errors(submission, checked, problem(rng, (2, 3, 5)))
    for name, error in errors.items():
        expect.that(0.6 < error < 0.73, f"{name} is three times too short, not off by {error:.3g}")


@trap(
    "check-relative-to-one-side",
    catches="the error divided by the analytic gradient alone: one that is too short looks worse",
    severity="minor",
    story="A backward pass that returned zeros was off by 1e12, and the report overflowed.",
)
def check_relative_to_one_side(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    for place, name in enumerate(NAMES):
        for by, want in ((0.25, 0.75), (4.0, 0.75), (0.0, 1.0)):
            error = gradient_errors(submission, passes(partial(scaled, place, by)), p)[name]
            good = abs(error - want) < 1e-3
            expect.that(good, f"{name} times {by} is off by {want}, not by {error:.3g}")


@trap(
    "check-one-sided",
    catches="a forward difference where the contract asks for a central one",
    severity="minor",
    story="Half the calls, and an error of the step's own size: near 1e-5 right and wrong met.",
)
def check_one_sided(submission: Submission, rng: Rng) -> None:
    for name, moves in _moves(submission, rng).items():
        for move in moves:
            opposite = [np.linalg.norm(move + other) for other in moves]
            met = min(opposite) <= 1e-5 * np.linalg.norm(move)
            expect.that(met, f"{name}: an input is moved one way and not the other")


@trap(
    "check-of-one-direction",
    catches="fewer than four directions, where not every element is looked at on its own",
    severity="minor",
    story="One random direction for a million elements: a wrong one hid behind the luck of the "
    "draw.",
)
def check_of_one_direction(submission: Submission, rng: Rng) -> None:
    for name, moves in _moves(submission, rng).items():
        expect.that(len(moves) >= 8, f"{name}: {len(moves)} calls of forward, two a direction")


def _moves(submission: Submission, rng: Rng) -> dict[str, list[Array]]:
    """By how much gradient_check moved gamma and beta in its calls of forward.

    x is left out: several directions of it may share a call, one behind the other in the batch.
    """
    p, checked = problem(rng, (2, 3, 5)), passes()
    gradient_errors(submission, checked, p)
    shifts = {
        "dgamma": [gamma - p.gamma for _, (_, gamma, _) in checked.forward.calls],
        "dbeta": [beta - p.beta for _, (_, _, beta) in checked.forward.calls],
    }
    return {name: [move for move in moves if move.any()] for name, moves in shifts.items()}


def _thrice(x: Array, gamma: Array, beta: Array) -> tuple[Array, tuple[Array, Array]]:
    return 3.0 * oracle.layer_norm(x, gamma, beta), (x, gamma)


def _one_element_wrong(place: int, element: int, grads: Grads) -> Grads:
    wrong: list[Array] = [np.array(gradient) for gradient in grads]
    wrong[place].flat[element] += np.linalg.norm(wrong[place])
    return wrong[0], wrong[1], wrong[2]
