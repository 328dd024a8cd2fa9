"""Layer normalisation over the last axis: forward, backward, gradient check.

The work is done on float64 matrices with one row per feature and one column per position, (D, B*T), so that a
statistic of a position is a reduction over the first axis and a sum for a parameter one over the second.
"""

import math

import numpy as np

DIRECTIONS = 4
RELATIVE_STEP = 1e-6


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x, gamma, beta = _check_inputs(x, gamma, beta)
    eps = _check_eps(eps)
    columns = _to_columns(x)
    centred = columns - columns.mean(axis=0)
    # The mean of large values is rounded; what it left behind is small and is taken off exactly.
    centred -= centred.mean(axis=0)
    spread = _root_mean_square(centred)
    scale = np.hypot(spread, math.sqrt(eps))
    normed = centred / scale
    y = gamma[:, None].astype(np.float64) * normed + beta[:, None]
    rstd = (1.0 / scale).reshape(x.shape[:2])
    cache = (normed.astype(x.dtype), rstd.astype(x.dtype), gamma.copy())
    return _from_columns(y, x), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    normed, rstd, gamma = cache
    dy = _check_float(dy, "dy", 3)
    if dy.shape != (*rstd.shape, gamma.size):
        raise ValueError("dy must have the shape of x")
    normed = normed.astype(np.float64)
    upstream = _to_columns(dy)
    dgamma = (upstream * normed).sum(axis=1)
    dbeta = upstream.sum(axis=1)
    dnormed = upstream * gamma[:, None]
    along = (dnormed * normed).mean(axis=0)
    dx = dnormed - dnormed.mean(axis=0) - normed * along
    dx *= rstd.reshape(-1)
    return _from_columns(dx, dy), dgamma.astype(dy.dtype), dbeta.astype(dy.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    The derivatives are compared along random directions of entries +1 and -1, so that every element moves.
    """
    inputs = _check_inputs(x, gamma, beta)
    dy = _check_float(dy, "dy", 3)
    if dy.shape != inputs[0].shape:
        raise ValueError("dy must have the shape of x")
    _, cache = forward(*(array.copy() for array in inputs))
    gradients = [np.array(gradient) for gradient in backward(dy.copy(), cache)]
    rng = np.random.default_rng(20240229)
    errors = {}
    for place, name in enumerate(("dx", "dgamma", "dbeta")):
        if gradients[place].shape != inputs[place].shape:
            raise ValueError(f"{name} has a wrong shape")
        directions = [_random_signs(rng, inputs[place].shape) for _ in range(DIRECTIONS)]
        analytic = np.array([np.sum(gradients[place] * direction) for direction in directions])
        numerical = np.array([_slope(forward, inputs, place, direction, dy) for direction in directions])
        errors[name] = _relative_error(analytic, numerical)
    return errors


def _slope(forward, inputs, place, direction, dy):
    """The central difference of sum(dy * y) when one input moves along a direction."""
    size = np.sqrt(np.mean(inputs[place] ** 2)) if inputs[place].size else 0.0
    step = RELATIVE_STEP * (size or 1.0)
    outputs = []
    for signed_step in (step, -step):
        moved = [array.copy() for array in inputs]
        moved[place] += signed_step * direction
        outputs.append(np.array(forward(*moved)[0]))
    return np.sum(dy * (outputs[0] - outputs[1])) / (2.0 * step)


def _random_signs(rng, shape):
    return 2.0 * rng.integers(0, 2, size=shape) - 1.0


def _relative_error(analytic, numerical):
    """|a - n| / max(|a|, |n|, 1e-12) in the 2-norm; infinite where a value is not finite."""
    if not (np.isfinite(analytic).all() and np.isfinite(numerical).all()):
        return math.inf
    largest = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
    return float(np.linalg.norm(analytic - numerical) / largest)


def _root_mean_square(centred):
    """Per column; the values are divided by the largest first, so that no square overflows or vanishes."""
    peak = np.abs(centred).max(axis=0)
    peak[peak == 0] = 1.0
    return peak * np.sqrt(np.mean((centred / peak) ** 2, axis=0))


def _to_columns(array):
    """(B, T, D) as a float64 matrix (D, B*T), with the features in rows."""
    positions = array.shape[0] * array.shape[1]
    return np.moveaxis(array, -1, 0).reshape(array.shape[2], positions).astype(np.float64)


def _from_columns(columns, like):
    """A matrix (D, B*T) as an array with the shape and dtype of `like`."""
    return columns.T.reshape(like.shape).astype(like.dtype)


def _check_float(array, name, ndim):
    array = np.asarray(array)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes")
    return array


def _check_inputs(x, gamma, beta):
    x = _check_float(x, "x", 3)
    gamma = _check_float(gamma, "gamma", 1)
    beta = _check_float(beta, "beta", 1)
    features = x.shape[2]
    if features < 1:
        raise ValueError("x must have at least one feature")
    if gamma.size != features or beta.size != features:
        raise ValueError("gamma and beta must have one entry for each feature")
    return x, gamma, beta


def _check_eps(eps):
    eps = float(eps)
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError("eps must be positive and finite")
    return eps
