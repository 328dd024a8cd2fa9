"""Layer normalisation over the last axis: forward, backward, gradient check.

Every row is taken relative to its first element (so a constant row is exactly
zero and a large mean costs no digits) and then scaled by a power of two (so its
squares cannot overflow). All inner arithmetic is float64; the cache holds the
raw x, and the backward pass normalises it afresh.
"""

import numbers

import numpy as np

DIRECTIONS = 16  # of each input of the gradient check, four calls of forward each
STEP = 4e-5
STENCIL = ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12))  # central, error O(step^4)


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x, gamma, beta = _checked(x, gamma, beta)
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a real number")
    eps = float(eps)
    if not 0.0 < eps < np.inf:
        raise ValueError("eps must be positive and finite")
    xhat, _ = _normalise(x, eps)
    y = (xhat * gamma + beta).astype(x.dtype)
    cache = {
        "x": np.array(x, order="C"),
        "gamma": np.array(gamma),
        "eps": eps,
    }
    return y.reshape(x.shape), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma = cache["x"], cache["gamma"]
    dy = _real_array(dy, "dy")
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {dy.shape}, x had {x.shape}")
    if dy.dtype != x.dtype:
        raise TypeError(f"dy is {dy.dtype}, x was {x.dtype}")
    xhat, rstd = _normalise(x, float(cache["eps"]))
    dy = dy.reshape(xhat.shape).astype(np.float64)
    dgamma = (dy * xhat).sum(axis=0)
    dbeta = dy.sum(axis=0)
    # g without its parts along the vector of ones and along xhat.
    g = dy * gamma
    along_xhat = (g * xhat).mean(axis=1, keepdims=True)
    dx = g - g.mean(axis=1, keepdims=True)
    dx -= xhat * along_xhat
    dx *= rstd
    return dx.astype(x.dtype).reshape(x.shape), dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences."""
    x, gamma, beta = _checked(x, gamma, beta)
    dy = _real_array(dy, "dy")
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {dy.shape}, x has {x.shape}")
    inputs = (x, gamma, beta)
    _, cache = forward(*inputs)
    gradients = backward(dy, cache)
    rng = np.random.default_rng(20240229)
    errors = {}
    for place, name in enumerate(("dx", "dgamma", "dbeta")):
        value = inputs[place]
        gradient = np.asarray(gradients[place])
        if gradient.shape != value.shape:
            raise ValueError(f"{name} has shape {gradient.shape}, expected {value.shape}")
        step = STEP * _spread(value)
        analytic, numerical = [], []
        for direction in _directions(value.shape, rng):
            change = _change(forward, inputs, place, step * direction)
            numerical.append(np.sum(dy * change) / step)
            analytic.append(np.sum(gradient * direction))
        errors[name] = _relative_error(np.array(analytic), np.array(numerical))
    return errors


def _normalise(x, eps):
    """(xhat, rstd) in float64, as (rows, D) and (rows, 1)."""
    depth = x.shape[2]
    rows = x.reshape(x.shape[0] * x.shape[1], depth).astype(np.float64)
    rows = rows - rows[:, :1]
    rows -= rows.mean(axis=1, keepdims=True)
    _, exponent = np.frexp(np.abs(rows).max(axis=1, keepdims=True))
    exponent = np.maximum(exponent, 0)
    scaled = np.ldexp(rows, -exponent)
    variance = np.square(scaled).mean(axis=1, keepdims=True)
    rstd = 1.0 / np.sqrt(variance + np.ldexp(eps, -2 * exponent))
    return scaled * rstd, np.ldexp(rstd, -exponent)


def _directions(shape, rng):
    """Random signs: each direction moves every element, all by the same amount."""
    for _ in range(DIRECTIONS):
        yield rng.choice((-1.0, 1.0), size=shape)


def _change(forward, inputs, place, offset):
    """Derivative of y, by the stencil, as one input moves along offset."""
    change = 0.0
    for factor, weight in STENCIL:
        moved = list(inputs)
        moved[place] = moved[place] + factor * offset
        change = change + weight * forward(*moved)[0]
    return change


def _spread(value):
    """A length to measure steps by: the mean distance from the first of each row."""
    if value.size == 0:
        return 1.0
    return max(float(np.abs(value - value[..., :1]).mean()), 1e-2)


def _relative_error(analytic, numerical):
    """|a - n| / max(|a|, |n|, 1e-12), infinite where a derivative is not finite."""
    scale = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
    error = float(np.linalg.norm(analytic - numerical) / scale)
    return error if np.isfinite(error) else float("inf")


def _checked(x, gamma, beta):
    """The three arrays, once ranks, shapes and dtypes are right."""
    x, gamma, beta = _real_array(x, "x"), _real_array(gamma, "gamma"), _real_array(beta, "beta")
    if x.ndim != 3 or x.shape[2] < 1:
        raise ValueError(f"x must have shape (B, T, D) with D at least 1, not {x.shape}")
    if gamma.shape != x.shape[2:]:
        raise ValueError(f"gamma must have shape {x.shape[2:]}, not {gamma.shape}")
    if beta.shape != x.shape[2:]:
        raise ValueError(f"beta must have shape {x.shape[2:]}, not {beta.shape}")
    if not x.dtype == gamma.dtype == beta.dtype:
        raise TypeError("x, gamma and beta must have one dtype")
    return x, gamma, beta


def _real_array(value, name):
    """value as an array of float32 or float64."""
    value = np.asarray(value)
    if value.dtype.kind != "f" or value.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} must be float32 or float64, not {value.dtype}")
    return value
