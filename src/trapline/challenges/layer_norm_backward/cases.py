"""The contract of layer_norm_backward, and its measures."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.remembered import remembered
from trapline.arena.judge.traps import Call, Precision, case, robustness
from trapline.arena.process.proxy import RemoteObject, Stub, Submission
from trapline.gold.norms import oracle

Rng = np.random.Generator
Array = np.ndarray
REFUSAL = (ValueError, TypeError)
NAMES = ("dx", "dgamma", "dbeta")
layer_norm = remembered(oracle.layer_norm)
layer_norm_backward = remembered(oracle.layer_norm_backward)


class Problem(NamedTuple):
    """One set of inputs, all of one dtype."""

    x: Array  # (B, T, D)
    gamma: Array  # (D,)
    beta: Array  # (D,)
    dy: Array  # (B, T, D)
    eps: float = 1e-5

    @property
    def args(self) -> tuple[Array, Array, Array, float]:
        return self.x, self.gamma, self.beta, self.eps


def problem(
    rng: Rng,
    shape: tuple[int, int, int] = (2, 3, 8),
    dtype: Any = np.float64,
    *,
    offset: float = 0.0,
    spread: float = 1.0,
    eps: float = 1e-5,
) -> Problem:
    """Rows of this offset and spread. No gamma and no dy is near 0, so that nothing drops out."""
    x = offset + spread * rng.standard_normal(shape)
    gamma = rng.uniform(0.5, 2.0, shape[-1:]) * rng.choice([-1.0, 1.0], shape[-1:])
    beta = rng.uniform(0.5, 2.0, shape[-1:])
    dy = rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape)
    x, gamma, beta, dy = (value.astype(dtype) for value in (x, gamma, beta, dy))
    return Problem(x, gamma, beta, dy, eps)


def slack(p: Problem) -> float:
    """Relative error that any sound algorithm keeps, whatever the order of its sums.

    A sum of D terms costs at most D roundings. Rounding the mean costs one more, as large as the
    mean is against √(var + eps): that factor belongs to the problem, not to the algorithm.
    """
    if not p.x.size:
        return 0.0
    wide = p.x.astype(np.float64)
    ratio = np.abs(wide.mean(-1)) / np.sqrt(wide.var(-1) + p.eps)
    return float(np.finfo(p.x.dtype).eps * (32 + 4 * p.x.shape[-1]) * (1 + ratio.max()))


def check_forward(y: Any, p: Problem) -> None:
    """y is right for this problem."""
    y = expect.array(y, shape=p.x.shape, dtype=p.x.dtype, what="y")
    exact = layer_norm(p.x, p.gamma, p.beta, p.eps)
    scale = np.abs(p.gamma).max() * np.sqrt(p.x.shape[-1]) + np.abs(p.beta).max()
    expect.close(y, exact, atol=float(scale) * slack(p), what="y")


def check_grads(grads: Any, p: Problem, only: tuple[str, ...] = NAMES) -> None:
    """The gradients (all three, or only these) are right for this problem."""
    grads = three(grads)
    exact = layer_norm_backward(p.dy, p.x, p.gamma, p.eps)
    dy, wide = p.dy.astype(np.float64), p.x.astype(np.float64)
    rstd = 1.0 / np.sqrt(wide.var(-1) + p.eps)[..., None]
    rows = p.x.shape[0] * p.x.shape[1]
    largest = float(np.sqrt(p.x.shape[-1]))  # |x_hat| never exceeds this
    # x_hat · mean(g · x_hat) may be larger than g itself, by at most this factor.
    scales = (
        np.abs(rstd * np.abs(dy * p.gamma).max(-1, keepdims=True, initial=0.0)) * largest,
        np.abs(dy).sum((0, 1)) * largest * (1 + rows / 64),
        np.abs(dy).sum((0, 1)) * (1 + rows / 64),
    )
    for name, got, want, scale in zip(NAMES, grads, exact, scales, strict=True):
        if name not in only:
            continue
        expect.array(got, shape=want.shape, dtype=p.x.dtype, what=name)
        excess = np.abs(got - want) - slack(p) * scale
        good = bool(np.all(excess <= 0))
        worst = float(np.abs(got - want).max()) if got.size and not good else 0.0
        expect.that(good, f"{name} is off by up to {worst:.3g} (norm {np.linalg.norm(want):.3g})")


def three(grads: Any) -> tuple[Any, Any, Any]:
    """The answer of backward is a triple."""
    expect.that(
        isinstance(grads, tuple | list) and len(grads) == 3,
        "layer_norm_backward did not return (dx, dgamma, dbeta)",
    )
    return grads[0], grads[1], grads[2]


def forward(submission: Submission, p: Problem) -> tuple[Any, Any]:
    """(y, cache) of the submission."""
    answer = submission.layer_norm_forward(*p.args)
    expect.that(
        isinstance(answer, tuple | list) and len(answer) == 2,
        "layer_norm_forward did not return (y, cache)",
    )
    return answer[0], answer[1]


def check_both(submission: Submission, p: Problem) -> None:
    """Forward and backward are right for this problem."""
    y, cache = forward(submission, p)
    check_forward(y, p)
    check_grads(submission.layer_norm_backward(p.dy, cache), p)


def cache_parts(cache: Any) -> list[Any]:
    """The arrays and numbers of a cache, which must be flat and plain."""
    expect.that(not isinstance(cache, RemoteObject), "the cache is an object of a class")
    expect.that(isinstance(cache, tuple | list | dict), f"the cache is a {type(cache).__name__}")
    parts = list(cache.values()) if isinstance(cache, dict) else list(cache)
    for part in parts:
        expect.that(not isinstance(part, RemoteObject), "the cache holds an object of a class")
        expect.that(not isinstance(part, tuple | list | dict), "the cache holds a container")
        plain = isinstance(part, np.ndarray | np.generic | int | float | bool)
        expect.that(plain, f"the cache holds a {type(part).__name__}")
    return parts


def check_cache_size(cache: Any, p: Problem) -> None:
    """bytes(x) + two (B,T) + two (D,) + 64, and not more."""
    size = sum(part.nbytes if isinstance(part, np.ndarray) else 8 for part in cache_parts(cache))
    batch, length, width = p.x.shape
    limit = p.x.nbytes + 2 * p.x.itemsize * (batch * length + width) + 64
    expect.that(size <= limit, f"the cache holds {size} bytes, {limit} are enough")


class Checked(NamedTuple):
    """A forward and a backward pass that stay with the judge, for gradient_check."""

    forward: Stub
    backward: Stub


Grads = tuple[Array, Array, Array]
Spoil = Callable[[Grads], Grads]


def passes(spoil: Spoil = lambda grads: grads) -> Checked:
    """The oracle's passes; `spoil` turns right gradients into wrong ones."""

    def run_forward(x: Array, gamma: Array, beta: Array) -> tuple[Array, tuple[Array, Array]]:
        return oracle.layer_norm(x, gamma, beta), (x, gamma)

    def run_backward(dy: Array, cache: tuple[Array, Array]) -> Grads:
        return spoil(oracle.layer_norm_backward(dy, *cache))

    return Checked(Stub(run_forward), Stub(run_backward))


def gradient_errors(submission: Submission, checked: Checked, p: Problem) -> dict[str, float]:
    """The answer of gradient_check, of the right form."""
    errors = submission.gradient_check(*checked, p.x, p.gamma, p.beta, p.dy)
    expect.that(isinstance(errors, dict), f"gradient_check returned a {type(errors).__name__}")
    expect.that(set(errors) == set(NAMES), f"gradient_check returned the keys {sorted(errors)}")
    for name, error in errors.items():
        is_number = isinstance(error, float | np.floating)
        expect.that(is_number, f"the error of {name} is a {type(error).__name__}")
    return {name: float(error) for name, error in errors.items()}


def check_errors(errors: dict[str, float], wrong: str | None, low: float = 1e-4) -> None:
    """Every error is small, except that of the entry that is wrong."""
    for name, error in errors.items():
        if name == wrong:
            expect.that(error > low, f"a wrong {name} passes with an error of {error:.3g}")
        else:
            expect.that(error < 1e-5, f"a right {name} gets an error of {error:.3g}")


def scaled(place: int, by: float, grads: Grads) -> Grads:
    """A spoil: one of the three gradients is too long."""
    wrong = list(grads)
    wrong[place] = wrong[place] * by
    return wrong[0], wrong[1], wrong[2]


def judged(entry: str, answer: Any) -> Any:
    """What two answers are compared by.

    The form of the cache is free. Of the errors of a gradient check those that count as none are
    equal, and the others are compared in three digits: the directions are free.
    """
    is_tuple = isinstance(answer, tuple | list) and len(answer) > 0
    if is_tuple and isinstance(answer[0], tuple | list | dict):  # with the arguments as left
        left = answer[1][:1] if entry == "layer_norm_backward" else answer[1]
        return judged(entry, answer[0]), left
    if entry == "layer_norm_forward" and is_tuple:
        return answer[:1]
    return _rounded(answer) if entry == "gradient_check" else answer


def _rounded(errors: Any) -> Any:
    if not isinstance(errors, dict):
        return errors
    return {name: _three_digits(error) for name, error in errors.items()}


def _three_digits(error: Any) -> Any:
    if not isinstance(error, float | np.floating) or not np.isfinite(error):
        return error
    return 0.0 if error < 1e-5 else float(f"{error:.3g}")


@case
def forward_matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        for shape in ((2, 3, 8), (1, 1, 33), (3, 2, 100)):
            p = problem(rng, shape, dtype, offset=1.0, spread=3.0)
            check_forward(forward(submission, p)[0], p)


@case
def epsilon_is_1e_5_unless_said(submission: Submission, rng: Rng) -> None:
    p = problem(rng, spread=1e-3)
    y, _ = submission.layer_norm_forward(p.x, p.gamma, p.beta)
    check_forward(y, p)


@case
def backward_matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        for shape in ((2, 3, 8), (1, 1, 33), (3, 2, 100)):
            check_both(submission, problem(rng, shape, dtype, offset=1.0, spread=3.0))


@case
def backward_matches_a_derivation_by_steps(submission: Submission, rng: Rng) -> None:
    """The Jacobian of one row, element by element, from the definition of each entry."""
    p = problem(rng, (2, 2, 5))
    dx, _, _ = three(submission.layer_norm_backward(p.dy, forward(submission, p)[1]))
    width = p.x.shape[-1]
    want = np.zeros(p.x.shape)
    for place in np.ndindex(p.x.shape[:2]):
        centred = p.x[place] - p.x[place].mean()
        deviation = np.sqrt(np.mean(centred**2) + p.eps)
        jacobian = np.zeros((width, width))  # d x_hat_i / d x_j
        for i, j in np.ndindex(width, width):
            dcentred = (i == j) - 1 / width
            ddeviation = centred[j] / (width * deviation)
            jacobian[i, j] = dcentred / deviation - centred[i] * ddeviation / deviation**2
        want[place] = jacobian.T @ (p.gamma * p.dy[place])
    expect.close(dx, want, rtol=1e-9, atol=1e-9, what="dx")


@case
def backward_of_backward_is_symmetric(submission: Submission, rng: Rng) -> None:
    """With gamma = 1 the Jacobian J of a row is symmetric: ⟨u, J v⟩ = ⟨v, J u⟩, and so is J²."""
    p = problem(rng, (2, 3, 9))
    p = p._replace(gamma=np.ones(9))
    _, cache = forward(submission, p)
    u, v = rng.standard_normal((2, *p.x.shape))
    ju = three(submission.layer_norm_backward(u, cache))[0]
    jv = three(submission.layer_norm_backward(v, cache))[0]
    jju = three(submission.layer_norm_backward(ju, cache))[0]
    expect.close(np.sum(u * jv, -1), np.sum(v * ju, -1), rtol=1e-9, atol=1e-9, what="⟨u, J v⟩")
    expect.close(np.sum(v * jju, -1), np.sum(jv * ju, -1), rtol=1e-9, atol=1e-9, what="⟨v, J J u⟩")


@case
def gradients_are_orthogonal_and_bounded(submission: Submission, rng: Rng) -> None:
    """dx sums to 0 in each row (a shift changes nothing) and is never longer than rstd · |g|."""
    p = problem(rng, (3, 4, 16), spread=0.3)
    _, cache = forward(submission, p)
    dx, dgamma, dbeta = three(submission.layer_norm_backward(p.dy, cache))
    expect.array(dx, shape=p.x.shape, dtype=p.x.dtype, what="dx")
    expect.close(dx.sum(-1), np.zeros(p.x.shape[:2]), atol=1e-10, what="the row sums of dx")
    bound = np.linalg.norm(p.dy * p.gamma, axis=-1) / np.sqrt(p.x.var(-1) + p.eps)
    norms = np.linalg.norm(dx, axis=-1)
    expect.that(bool(np.all(norms <= bound * (1 + 1e-9))), "dx is longer than rstd · |dy · gamma|")
    expect.that(bool(np.all(norms > 0)), "dx vanishes")
    expect.that(bool(np.all(np.isfinite(dgamma)) and np.all(dbeta != 0)), "dgamma or dbeta is odd")


@case
def gradients_are_linear_in_dy(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _, cache = forward(submission, p)
    other = rng.standard_normal(p.x.shape)
    first = three(submission.layer_norm_backward(p.dy, cache))
    second = three(submission.layer_norm_backward(other, cache))
    both = three(submission.layer_norm_backward(2.0 * p.dy - 3.0 * other, cache))
    for name, a, b, ab in zip(NAMES, first, second, both, strict=True):
        expect.close(ab, 2.0 * a - 3.0 * b, rtol=1e-9, atol=1e-9, what=name)


@case
def cache_is_plain_and_travels(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _, cache = forward(submission, p)
    cache_parts(cache)
    check_grads(submission.clean().layer_norm_backward(p.dy, cache), p)


@case
def gradient_check_accepts_the_right_and_refuses_the_wrong(
    submission: Submission, rng: Rng
) -> None:
    p = problem(rng, (2, 3, 6))
    check_errors(gradient_errors(submission, passes(), p), None)
    for place, name in enumerate(NAMES):
        spoiled = passes(partial(scaled, place, 1.5))
        check_errors(gradient_errors(submission, spoiled, p), name, low=0.2)


@case
def backward_agrees_with_forward_differences(submission: Submission, rng: Rng) -> None:
    """The submission's own gradients, judged along one direction by the judge's own differences."""
    p = problem(rng, (2, 2, 7))
    dx, _, _ = three(submission.layer_norm_backward(p.dy, forward(submission, p)[1]))
    v, step = rng.standard_normal(p.x.shape), 1e-5
    ahead = forward(submission, p._replace(x=p.x + step * v))[0]
    behind = forward(submission, p._replace(x=p.x - step * v))[0]
    expect.array(ahead, shape=p.x.shape, dtype=p.x.dtype, what="y")
    numeric = np.sum(p.dy * (ahead - behind)) / (2 * step)
    scale = float(np.linalg.norm(dx) * np.linalg.norm(v))
    analytic = float(np.sum(dx * v))
    expect.that(
        abs(analytic - numeric) <= 1e-6 * scale,
        f"⟨dx, v⟩ is {analytic:.9g}, expected {numeric:.9g}",
    )


@case
def empty_batches_work(submission: Submission, rng: Rng) -> None:
    for shape in ((0, 3, 4), (2, 0, 4), (0, 0, 1)):
        check_both(submission, problem(rng, shape, np.float32))


@robustness
def bad_input_is_refused(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 4))
    for wrong in (
        p._replace(x=p.x[0]),
        p._replace(gamma=p.gamma[:-1]),
        p._replace(beta=p.beta[None]),
        p._replace(x=p.x.astype(np.int64)),
        p._replace(eps=-1e-5),
    ):
        expect.raises(REFUSAL, submission.layer_norm_forward, *wrong.args)


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32, with an ordinary mean and with one that is large against the spread."""
    measured = []
    for offset in (0.5, 50.0):
        p = problem(rng, (4, 64, 256), np.float32, offset=offset)
        y, cache = forward(submission, p)
        got = (y, *three(submission.layer_norm_backward(p.dy, cache)))
        exact = (
            oracle.layer_norm(*p.args),
            *oracle.layer_norm_backward(p.dy, p.x, p.gamma, p.eps),
        )
        measured += [Precision(*both) for both in zip(got, exact, _careful(p), strict=True)]
    return measured


def _careful(p: Problem) -> tuple[Array, Array, Array, Array]:
    """Two passes in the problem's own dtype, sums over rows in float64."""
    centred = p.x - p.x.mean(-1, keepdims=True)
    centred -= centred.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + p.x.dtype.type(p.eps))
    x_hat = centred * rstd
    g = p.dy * p.gamma
    dx = rstd * (g - g.mean(-1, keepdims=True) - x_hat * (g * x_hat).mean(-1, keepdims=True))
    dgamma = np.sum(p.dy * x_hat, axis=(0, 1), dtype=np.float64).astype(p.x.dtype)
    dbeta = np.sum(p.dy, axis=(0, 1), dtype=np.float64).astype(p.x.dtype)
    return p.gamma * x_hat + p.beta, dx, dgamma, dbeta


def speed(submission: Submission, rng: Rng) -> Call:
    """One backward pass of half a million elements."""
    p = problem(rng, (8, 64, 1024), np.float32)
    _, cache = forward(submission, p)
    return Call("layer_norm_backward", (p.dy, cache), check=lambda grads: check_grads(grads, p))
