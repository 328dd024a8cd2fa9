"""Layer normalisation over the last axis: forward, backward, gradient check.

The cache is a private copy of x, a copy of gamma, and eps. The backward pass standardises x again,
block of rows by block of rows and in float64, so nothing that was rounded to float32 enters it.
"""

import math
import numbers

import numpy as np

_BLOCK_ELEMENTS = 1 << 15  # elements of a block of rows: small enough to stay in a CPU cache
_HUGE = 1e150  # rows beyond this are scaled down before they are squared
_SHRINK = 2.0**-600

_DIRECTIONS = 6
_STEP = 2.0**-16


def _checked(name, value, shape=None, dtype=None):
    """The argument as an array of the wanted shape (default: any of rank 3) and dtype."""
    array = np.asarray(value)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name} is {array.dtype}, the other arguments are {dtype}")
    if shape is None:
        if array.ndim != 3 or array.shape[-1] < 1:
            raise ValueError(f"{name} must have shape (B, T, D) with D >= 1, not {array.shape}")
    elif array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
    return array


def _checked_eps(eps):
    """The argument eps as a float."""
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"eps must be a number, not {type(eps).__name__}")
    eps = float(eps)
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, not {eps}")
    return eps


def _blocks(count, width):
    """Slices that cut `count` rows of `width` elements into blocks."""
    height = max(1, _BLOCK_ELEMENTS // width)
    return [slice(start, start + height) for start in range(0, count, height)]


def _centred(rows):
    """rows minus their means.

    The first element is taken away before the mean is formed: a constant row becomes exactly zero,
    and a mean of 1e8 costs no digits of a spread of 1.
    """
    shifted = rows - rows[:, :1]
    shifted -= shifted.mean(axis=1, keepdims=True)
    return shifted


def _standardised(rows, eps):
    """(x - mean) / sqrt(var + eps) of every row, and the factor 1 / sqrt(var + eps), in float64."""
    rows = rows.astype(np.float64)
    peak = np.maximum(rows.max(axis=1), -rows.min(axis=1))[:, None]
    shrink = np.where(peak > _HUGE, _SHRINK, 1.0)
    rows *= shrink
    normed = _centred(rows)
    spread = np.sqrt(np.mean(normed * normed, axis=1, keepdims=True))
    factor = 1.0 / np.hypot(spread, math.sqrt(eps) * shrink)
    normed *= factor
    return normed, factor * shrink


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x = _checked("x", x)
    width = x.shape[-1]
    gamma = _checked("gamma", gamma, (width,), x.dtype)
    beta = _checked("beta", beta, (width,), x.dtype)
    eps = _checked_eps(eps)

    kept = np.array(x, order="C")
    rows = kept.reshape(-1, width)
    y = np.empty(rows.shape, x.dtype)
    for block in _blocks(len(rows), width):
        normed, _ = _standardised(rows[block], eps)
        normed *= gamma
        normed += beta
        y[block] = normed
    return y.reshape(x.shape), {"x": kept, "gamma": gamma.copy(), "eps": eps}


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache["x"], cache["gamma"], float(cache["eps"])
    dy = _checked("dy", dy, x.shape, x.dtype)
    width = x.shape[-1]

    rows = x.reshape(-1, width)
    dy_rows = dy.reshape(-1, width)
    dx = np.empty(rows.shape, x.dtype)
    dgamma = np.zeros(width)
    dbeta = np.zeros(width)
    for block in _blocks(len(rows), width):
        normed, factor = _standardised(rows[block], eps)
        upstream = dy_rows[block].astype(np.float64)
        dbeta += upstream.sum(axis=0)
        dgamma += (upstream * normed).sum(axis=0)
        # With g = dy * gamma: dx = (g - mean(g) - normed * mean(g * normed)) / sqrt(var + eps)
        slope = _centred(upstream * gamma)
        normed *= np.mean(slope * normed, axis=1, keepdims=True)
        slope -= normed
        slope *= factor
        dx[block] = slope
    return dx.reshape(x.shape), dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def _slope(forward, inputs, name, direction, dy):
    """Derivative of sum(dy * y) as inputs[name] moves along direction: a five-point central difference."""

    def output(step):
        moved = dict(inputs)
        moved[name] = inputs[name] + step * direction
        y, _ = forward(moved["x"], moved["gamma"], moved["beta"])
        return np.array(y, dtype=np.float64)

    near = np.sum(dy * (output(_STEP) - output(-_STEP)))
    far = np.sum(dy * (output(2 * _STEP) - output(-2 * _STEP)))
    return (8.0 * near - far) / (12.0 * _STEP)


def _relative_error(analytic, numerical):
    """|a - n| / max(|a|, |n|, 1e-12) in the 2-norm; infinite where that is not a number."""
    gap = np.linalg.norm(analytic - numerical)
    size = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
    error = float(gap / size)
    return error if math.isfinite(error) else math.inf


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Compared are the derivatives along random directions. Every component of a direction has a random
    sign and a size between 1/2 and 3/2, so that no element of a gradient can hide.
    """
    x = _checked("x", x).astype(np.float64)
    inputs = {
        "x": x,
        "gamma": _checked("gamma", gamma, x.shape[-1:]).astype(np.float64),
        "beta": _checked("beta", beta, x.shape[-1:]).astype(np.float64),
    }
    dy = _checked("dy", dy, x.shape).astype(np.float64)

    _, cache = forward(inputs["x"].copy(), inputs["gamma"].copy(), inputs["beta"].copy())
    gradients = backward(dy.copy(), cache)

    rng = np.random.default_rng(20240229)
    errors = {}
    for (name, value), gradient in zip(inputs.items(), gradients):
        gradient = np.asarray(gradient, dtype=np.float64)
        if gradient.shape != value.shape:
            errors["d" + name] = math.inf
            continue
        analytic = np.empty(_DIRECTIONS)
        numerical = np.empty(_DIRECTIONS)
        for index in range(_DIRECTIONS):
            direction = rng.uniform(0.5, 1.5, value.shape) * rng.choice((-1.0, 1.0), value.shape)
            analytic[index] = np.sum(gradient * direction)
            numerical[index] = _slope(forward, inputs, name, direction, dy)
        errors["d" + name] = _relative_error(analytic, numerical)
    return errors
