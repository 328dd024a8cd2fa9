"""Problems, controls and checks that several traps are built from."""

from typing import Any

import numpy as np

from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import (
    Problem,
    Rng,
    check_both,
    check_errors,
    check_forward,
    check_grads,
    forward,
    gradient_errors,
    passes,
    problem,
)

#: Where a bug of the blind corpus was seen.
WRITTEN_BLIND = "an answer written from this prompt alone"


def plain(rng: Rng, *args: Any, **kwargs: Any) -> Problem:
    """A problem with gamma = 1: a bug in the handling of gamma has traps of its own."""
    p = problem(rng, *args, **kwargs)
    return p._replace(gamma=np.ones_like(p.gamma))


def far_from_eps(rng: Rng, shape: tuple[int, int, int] = (2, 3, 8)) -> Problem:
    """Rows so wide that the handling of eps cannot be seen in float32."""
    return plain(rng, shape, np.float32, spread=1e4)


def exact_in_float32(rng: Rng) -> Problem:
    """Rows of ±1.5 with var + eps = 4, and a dy of whole numbers: no result needs rounding."""
    x = rng.permuted(np.tile([1.5, -1.5], (2, 3, 4)), axis=-1)
    dy = rng.integers(1, 5, (2, 3, 8)) * rng.choice([-1.0, 1.0], (2, 3, 8))
    p = plain(rng, (2, 3, 8), np.float32, eps=1.75)
    return p._replace(x=x.astype(np.float32), dy=dy.astype(np.float32), beta=np.round(p.beta))


def split(rng: Rng, *, mean: float = 0.0, along: float = 0.0, spread: float = 1.0) -> Problem:
    """gamma = 1, and a dy made of three parts that the three terms of dx act on one by one.

    Each row of dy is `mean` plus `along` · x_hat plus a part that is orthogonal to both.
    """
    p = plain(rng, (2, 3, 8), spread=spread)
    unit = (p.x - p.x.mean(-1, keepdims=True)) / p.x.std(-1, keepdims=True)
    rest = p.dy - p.dy.mean(-1, keepdims=True)
    rest -= unit * np.mean(rest * unit, axis=-1, keepdims=True)
    rows = rng.uniform(1.0, 2.0, (2, 3, 1))
    return p._replace(dy=rest + rows * (mean + along * unit))


def check_y(submission: Submission, p: Problem) -> None:
    """The forward pass alone is right."""
    check_forward(forward(submission, p)[0], p)


def check_gradients(submission: Submission, p: Problem, *names: str) -> None:
    """These gradients are right."""
    _, cache = forward(submission, p)
    check_grads(submission.layer_norm_backward(p.dy, cache), p, only=names)


def ordinary_rows(submission: Submission, rng: Rng) -> None:
    """A control: packed rows of mean 0 and spread 1."""
    check_both(submission, plain(rng))


def ordinary_float32(submission: Submission, rng: Rng) -> None:
    """A control: packed float32 rows of mean 0 and spread 1."""
    check_both(submission, plain(rng, dtype=np.float32))


def right_passes(submission: Submission, rng: Rng) -> None:
    """A control: the check of a right backward pass on a small input."""
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)
