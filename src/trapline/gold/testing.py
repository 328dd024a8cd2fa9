"""Compares answers: error budgets against float64, gradients along random directions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def relative_error(analytic: Any, numeric: Any) -> float:
    """|a − n| / max(|a|, |n|, 1e-12) in the 2-norm."""
    a, n = (np.asarray(value, dtype=np.float64) for value in (analytic, numeric))
    scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(n)), 1e-12)
    return float(np.linalg.norm(a - n)) / scale


def largest_error(got: Any, exact: Any) -> float:
    """The largest |got − exact|; infinities must coincide, and a NaN is infinitely wrong."""
    got, exact = (np.asarray(value, dtype=np.float64) for value in (got, exact))
    if got.shape != exact.shape:
        raise AssertionError(f"shape {got.shape}, expected {exact.shape}")
    with np.errstate(invalid="ignore"):
        distance = np.where(got == exact, 0.0, np.abs(got - exact))
    return float(np.max(np.nan_to_num(distance, nan=np.inf, posinf=np.inf), initial=0.0))


def assert_within_budget(
    got: Any, exact: Any, careful: Any, *, factor: float = 2.0, what: str = "the answer"
) -> None:
    """The error of `got` is at most `factor` times that of `careful`, a plain answer in its dtype.

    One unit in the last place of the largest exact value is always allowed: rounding the exact
    answer costs that much.
    """
    last_place = float(np.finfo(np.asarray(careful).dtype).eps) * float(
        np.max(np.abs(np.asarray(exact, dtype=np.float64)), initial=0.0)
    )
    budget = factor * largest_error(careful, exact) + last_place
    error = largest_error(got, exact)
    if not error <= budget:
        raise AssertionError(f"{what} is off by {error:.3g}, the budget is {budget:.3g}")


def gradient_errors(
    function: Callable[..., F64],
    gradients: Sequence[F64],
    inputs: Sequence[F64],
    upstream: F64,
    *,
    directions: int = 6,
    seed: int = 0,
) -> list[float]:
    """For each input, the relative error of its gradient along a batch of random directions.

    Every direction moves all elements of one input at once, so two calls of `function` test the
    whole gradient: 2 · directions calls an input, whatever its size. A wrong element i shifts the
    derivative along v by (error of i) · v_i, and no v_i is small.
    """
    rng = np.random.default_rng(seed)
    errors = []
    for place, (value, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        pairs = [
            _along(function, inputs, place, gradient, upstream, _direction(rng, value.shape))
            for _ in range(directions)
        ]
        analytic, numeric = zip(*pairs, strict=True)
        errors.append(relative_error(analytic, numeric))
    return errors


def _direction(rng: np.random.Generator, shape: tuple[int, ...]) -> F64:
    return rng.choice([-1.0, 1.0], size=shape) * rng.uniform(0.5, 1.5, size=shape)


def _along(
    function: Callable[..., F64],
    inputs: Sequence[F64],
    place: int,
    gradient: F64,
    upstream: F64,
    direction: F64,
) -> tuple[float, float]:
    """The derivative of ⟨upstream, function⟩ along one direction: analytic, and by differences."""
    value = inputs[place]
    spread = float(np.sqrt(np.mean(value**2))) if value.size else 0.0
    # The cube root of eps balances truncation (h²) against cancellation (eps / h).
    step = float(np.finfo(np.float64).eps) ** (1 / 3) * max(spread, 1e-3)

    def shifted(by: float) -> F64:
        moved = [*inputs]
        moved[place] = value + by * direction
        return function(*moved)

    # Difference first, then sum: two large sums would cancel.
    change = shifted(step) - shifted(-step)
    return float(np.vdot(gradient, direction)), float(np.vdot(upstream, change)) / (2 * step)
