"""Layer normalisation over the last axis: forward, backward with a minimal cache, gradient check.

Shapes: x, y, dy, dx (B, T, D); gamma, beta and their gradients (D,). Arithmetic runs in float64
and is rounded once, to the dtype of the inputs. The derivation is in ANALYSIS.md.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

DIRECTIONS = 6
#: Cube root of the float64 epsilon: balances the two errors of a central difference.
STEP = 6e-6


def layer_norm_forward(
    x: Array, gamma: Array, beta: Array, eps: float = 1e-5
) -> tuple[Array, tuple[Array, Array, Array]]:
    """(y, cache); the cache holds x_hat (B, T, D), rstd (B, T) and gamma (D,), nothing else."""
    _require_floats(x=x, gamma=gamma, beta=beta)
    _require_shapes(x, gamma, beta)
    if not 0.0 < eps < np.inf:
        raise ValueError(f"eps must be positive and finite, got {eps}")
    wide = x.astype(np.float64)
    centred = wide - np.mean(wide, axis=-1, keepdims=True)
    # Squares of centred values: E[x^2] - E[x]^2 would cancel once the mean dwarfs the spread.
    var = np.mean(centred * centred, axis=-1)
    rstd = 1.0 / np.sqrt(var + eps)
    x_hat = centred * rstd[..., None]
    y = gamma * x_hat + beta
    return y.astype(x.dtype), (x_hat.astype(x.dtype), rstd.astype(x.dtype), gamma.copy())


def layer_norm_backward(dy: Array, cache: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """(dx, dgamma, dbeta) of sum(dy * y).

    With g = dy * gamma: dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)).
    """
    x_hat, rstd, gamma = cache
    _require_floats(dy=dy)
    if dy.shape != x_hat.shape:
        raise ValueError(f"dy has shape {dy.shape}, the forward pass had {x_hat.shape}")
    dtype = dy.dtype
    dy = dy.astype(np.float64)
    dgamma = np.sum(dy * x_hat, axis=(0, 1))
    dbeta = np.sum(dy, axis=(0, 1))
    g = dy * gamma
    mean_g = np.mean(g, axis=-1, keepdims=True)
    mean_gx = np.mean(g * x_hat, axis=-1, keepdims=True)
    dx = rstd[..., None] * (g - mean_g - x_hat * mean_gx)
    return dx.astype(dtype), dgamma.astype(dtype), dbeta.astype(dtype)


def gradient_check(
    forward: Callable, backward: Callable, x: Array, gamma: Array, beta: Array, dy: Array
) -> dict[str, float]:
    """Relative error of each gradient along random directions; every element moves in each."""
    rng = np.random.default_rng()
    inputs = (x, gamma, beta)
    gradients = backward(dy, forward(*inputs)[1])
    errors = {}
    for place, name in enumerate(("dx", "dgamma", "dbeta")):
        analytic, numeric = [], []
        for _ in range(DIRECTIONS):
            direction = _direction(rng, inputs[place])
            analytic.append(np.sum(gradients[place] * direction))
            numeric.append(_slope(forward, inputs, place, direction, dy))
        errors[name] = _relative_error(np.array(analytic), np.array(numeric))
    return errors


def _require_floats(**arrays: Array) -> None:
    """Refuses whatever is not a float32 or float64 array."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        if array.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} must be float32 or float64, got {array.dtype}")


def _require_shapes(x: Array, gamma: Array, beta: Array) -> None:
    """Refuses shapes other than (B, T, D), (D,), (D,): nothing is broadcast."""
    if x.ndim != 3:
        raise ValueError(f"x must have axes (B, T, D), got shape {x.shape}")
    width = x.shape[-1]
    if gamma.shape != (width,) or beta.shape != (width,):
        raise ValueError(f"gamma {gamma.shape} and beta {beta.shape} must both be ({width},)")


def _direction(rng: np.random.Generator, value: Array) -> Array:
    """A random sign in every element, scaled to the spread of its row."""
    spread = np.maximum(np.std(value, axis=-1, keepdims=True), 1e-3)
    return spread * rng.choice([-1.0, 1.0], value.shape)


def _slope(
    forward: Callable, inputs: tuple[Array, ...], place: int, direction: Array, dy: Array
) -> float:
    """Central difference of sum(dy * y) along a direction of one input."""

    def shifted(sign: float) -> Array:
        """The output with one input moved by a step."""
        moved = [
            value + sign * STEP * direction if i == place else value
            for i, value in enumerate(inputs)
        ]
        return forward(*moved)[0]

    # Difference first, then sum: two large sums would cancel.
    return np.sum(dy * (shifted(1.0) - shifted(-1.0))) / (2.0 * STEP)


def _relative_error(analytic: Array, numeric: Array) -> float:
    """|a - n| / max(|a|, |n|, 1e-12)."""
    scale = max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)
    return float(np.linalg.norm(analytic - numeric) / scale)
