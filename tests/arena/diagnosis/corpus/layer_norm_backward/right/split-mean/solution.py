"""Layer normalisation over the last axis: forward, backward, gradient check.

The cache keeps a copy of `x` and the mean of every row as a sum of two parts in the dtype of `x`:
a leading part, and the mean of what the leading part leaves over.  Together they carry about twice
the digits of the dtype, so that the backward pass centres a row exactly as well as the forward pass
did, and rebuilds its deviation from there.  All arithmetic is float64.
"""

import math
from numbers import Real

import numpy as np

DIRECTIONS = 8
RELATIVE_STEP = 1e-4
SMALLEST_SPREAD = 1e-2
SMALLEST_NORM = 1e-12


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _check_operands(x, gamma, beta)
    eps = _checked_eps(eps)

    wide = x.astype(np.float64)
    mean, correction = _split_mean(wide, x.dtype)
    centred = _centre(wide, mean, correction)
    normalised = centred / _deviation(centred, eps)
    y = _narrow(gamma.astype(np.float64) * normalised + beta.astype(np.float64), x.dtype)

    cache = {
        "x": np.array(x, order="C"),
        "mean": mean,
        "correction": correction,
        "gamma": np.array(gamma, order="C"),
        "eps": eps,
    }
    return y, cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma = cache["x"], cache["gamma"]
    _check_array("dy", dy, x.dtype)
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {dy.shape}, x has shape {x.shape}")

    centred = _centre(x.astype(np.float64), cache["mean"], cache["correction"])
    deviation = _deviation(centred, float(cache["eps"]))
    normalised = centred / deviation

    upstream = dy.astype(np.float64)
    dbeta = _sum_over_rows(upstream)
    dgamma = _sum_over_rows(upstream * normalised)

    # Of the gradient by `normalised`, the parts along the ones and along `normalised` do not reach x.
    inner = upstream * gamma.astype(np.float64)
    inner -= _row_mean(inner)
    inner -= normalised * _row_mean(inner * normalised)
    dx = inner / deviation
    return _narrow(dx, x.dtype), _narrow(dgamma, x.dtype), _narrow(dbeta, x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Both sides are derivatives along random directions: a sign for every element, times a step that
    suits the element.  An error in a single element reaches all of the directions in full.
    """
    if not (callable(forward) and callable(backward)):
        raise TypeError("forward and backward must be callable")
    _check_operands(x, gamma, beta)
    _check_array("dy", dy, x.dtype)
    if x.dtype != np.float64:
        raise TypeError("the gradient check works on float64 arrays")
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {dy.shape}, x has shape {x.shape}")

    operands = (x, gamma, beta)
    _, cache = forward(*_copies(operands))
    gradients = backward(dy.copy(), cache)

    rng = np.random.default_rng(20240229)
    errors = {}
    for place, name in enumerate(("dx", "dgamma", "dbeta")):
        steps = _row_steps(x) if place == 0 else _parameter_steps(gamma, beta)
        errors[name] = _directional_error(forward, operands, place, gradients[place], dy, steps, rng)
    return errors


# ---------------------------------------------------------------------------------------------
# Statistics of a row
# ---------------------------------------------------------------------------------------------


def _row_mean(wide):
    """Mean over the last axis, which is kept."""
    return np.mean(wide, axis=-1, keepdims=True)


def _split_mean(wide, dtype):
    """The mean of every row in two parts (B, T) of the given dtype."""
    mean = _row_mean(wide).astype(dtype)
    correction = _row_mean(wide - mean).astype(dtype)
    return mean[..., 0].copy(), correction[..., 0].copy()


def _centre(wide, mean, correction):
    """Rows minus their mean."""
    return (wide - mean[..., None].astype(np.float64)) - correction[..., None]


def _deviation(centred, eps):
    """sqrt(var + eps) of centred rows, without squaring large numbers."""
    largest = np.max(np.abs(centred), axis=-1, keepdims=True)
    scale = np.where(largest > 0.0, largest, 1.0)
    root_mean_square = scale * np.sqrt(_row_mean(np.square(centred / scale)))
    return np.hypot(root_mean_square, math.sqrt(eps))


def _sum_over_rows(wide):
    """Sum over batch and positions: (D,)."""
    return np.sum(wide, axis=(0, 1))


def _narrow(wide, dtype):
    """The result in the dtype of the call."""
    with np.errstate(over="ignore", under="ignore"):
        return wide.astype(dtype)


# ---------------------------------------------------------------------------------------------
# Pieces of the gradient check
# ---------------------------------------------------------------------------------------------


def _copies(arrays):
    return tuple(np.array(array, order="C") for array in arrays)


def _row_steps(x):
    """Steps (B, T, D): small against the spread of the row, large against the spacing of numbers."""
    spread = np.std(x, axis=-1, keepdims=True)
    steps = RELATIVE_STEP * np.maximum(spread, SMALLEST_SPREAD)
    return np.maximum(steps, 8.0 * np.spacing(np.abs(x)))


def _parameter_steps(gamma, beta):
    """Steps (D,) for gamma and for beta."""
    size = max(1.0, float(np.max(np.abs(gamma))), float(np.max(np.abs(beta))))
    return np.full(gamma.shape, RELATIVE_STEP * size)


def _directional_error(forward, operands, place, gradient, dy, steps, rng):
    """Relative error of one gradient over random directions."""
    gradient = np.asarray(gradient, dtype=np.float64)
    target = operands[place]
    if gradient.shape != target.shape:
        return math.inf

    analytic = np.zeros(DIRECTIONS)
    numerical = np.zeros(DIRECTIONS)
    for index in range(DIRECTIONS):
        step = steps * rng.choice((-1.0, 1.0), size=target.shape)
        upper, lower = target + step, target - step
        change = _moved(forward, operands, place, upper) - _moved(forward, operands, place, lower)
        numerical[index] = 0.5 * np.sum(dy * change) / RELATIVE_STEP
        analytic[index] = 0.5 * np.sum(gradient * (upper - lower)) / RELATIVE_STEP
    return _relative_error(analytic, numerical)


def _moved(forward, operands, place, replacement):
    """The output of the forward pass with one operand replaced."""
    arguments = list(_copies(operands))
    arguments[place] = replacement.copy()
    return forward(*arguments)[0]


def _relative_error(analytic, numerical):
    if not (np.all(np.isfinite(analytic)) and np.all(np.isfinite(numerical))):
        return math.inf
    size = max(np.linalg.norm(analytic), np.linalg.norm(numerical), SMALLEST_NORM)
    return float(np.linalg.norm(analytic - numerical) / size)


# ---------------------------------------------------------------------------------------------
# Refusal of bad input
# ---------------------------------------------------------------------------------------------


def _check_array(name, array, dtype=None):
    """Raise unless the array is float32 or float64, and of the given dtype."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array")
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name} is {array.dtype}, x is {dtype}")


def _check_operands(x, gamma, beta):
    _check_array("x", x)
    if x.ndim != 3 or x.shape[-1] < 1:
        raise ValueError(f"x must be (B, T, D) with D at least 1, not {x.shape}")
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        _check_array(name, parameter, x.dtype)
        if parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {parameter.shape}, expected {x.shape[-1:]}")


def _checked_eps(eps):
    if not isinstance(eps, Real):
        raise TypeError("eps must be a real number")
    try:
        value = float(eps)
    except OverflowError as error:
        raise ValueError("eps must be finite") from error
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"eps must be positive and finite, not {eps}")
    return value
