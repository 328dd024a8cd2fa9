"""Layer normalisation over the last axis: forward, backward, gradient check.

The cache holds the question, not the answer: a copy of `x` and `gamma`, and `eps`. The backward pass
replays the normalisation of each block of rows in float64 while the block is in the processor's
cache. So nothing that the backward pass uses was ever rounded to float32, and both passes share one
function, `_normalise`, that cannot disagree with itself.
"""

import math
import numbers

import numpy as np

BLOCK = 32768  # numbers of a block of rows that is worked on in float64 at one time
DIRECTIONS = 8  # random directions of the gradient check, for each of its three inputs


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x, gamma, beta = _checked_inputs(x, gamma, beta)
    eps = _checked_eps(eps)
    y = np.empty(x.shape, dtype=x.dtype)
    x_rows, y_rows = _as_rows(x), _as_rows(y)
    for block in _blocks(x_rows):
        normalised, _ = _normalise(x_rows[block], eps)
        y_rows[block] = gamma * normalised + beta
    return y, {"x": np.array(x, order="C"), "gamma": np.array(gamma), "eps": eps}


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache["x"], cache["gamma"], float(cache["eps"])
    dy = _checked_array("dy", dy, x.shape, x.dtype)
    dx = np.empty(x.shape, dtype=x.dtype)
    dgamma, dbeta = np.zeros(gamma.shape), np.zeros(gamma.shape)
    x_rows, dy_rows, dx_rows = _as_rows(x), _as_rows(dy), _as_rows(dx)
    for block in _blocks(x_rows):
        normalised, deviation = _normalise(x_rows[block], eps)
        slope = dy_rows[block].astype(np.float64)
        dgamma += (slope * normalised).sum(axis=0)
        dbeta += slope.sum(axis=0)
        slope *= gamma
        slope -= slope.mean(axis=1, keepdims=True)
        normalised *= (slope * normalised).mean(axis=1, keepdims=True)
        dx_rows[block] = (slope - normalised) / deviation
    return dx, dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Every input is moved as a whole along random directions of signs, so that each element counts
    equally in each direction. The numerical derivative is the five-point central difference.
    """
    point = [np.array(a, dtype=np.float64) for a in _checked_inputs(x, gamma, beta)]
    dy = np.array(_checked_array("dy", dy, point[0].shape), dtype=np.float64)
    _, cache = forward(*(a.copy() for a in point))
    gradients = backward(dy.copy(), cache)
    random = np.random.default_rng(2024)
    errors = {}
    for which, (name, step) in enumerate(zip(("dx", "dgamma", "dbeta"), _steps(*point))):
        gradient = np.asarray(gradients[which], dtype=np.float64)
        if gradient.shape != point[which].shape:
            errors[name] = math.inf
            continue
        analytic, numerical = np.zeros(DIRECTIONS), np.zeros(DIRECTIONS)
        for number in range(DIRECTIONS):
            direction = random.choice([-1.0, 1.0], size=gradient.shape)
            moved, change = _five_point(forward, point, which, step * direction)
            analytic[number] = np.sum(gradient * moved) / step
            numerical[number] = np.sum(dy * change) / step
        errors[name] = _relative_error(analytic, numerical)
    return errors


def _steps(x, gamma, beta):
    """Steps for x, gamma and beta: y is linear in the last two, but curved in x.

    A row bends at the scale of its deviation, a constant row at that of sqrt(eps), about 3e-3.
    """
    narrowest = x.std(axis=2).min() if x.size else 0.0
    height = max(1.0, np.abs(gamma).max())
    return 1e-3 * max(0.05, narrowest), 1e-3 * height, 1e-3 * max(height, np.abs(beta).max())


def _five_point(forward, point, which, move):
    """Five-point differences along `move` of input `which`, and of y: their ratio is the slope.

    The difference of the input is taken from the numbers that `forward` really saw, so that the
    rounding of `input + move` cancels.
    """
    moved, change = 0.0, 0.0
    for reach, weight in ((1, 8 / 12), (2, -1 / 12)):
        for side in (1, -1):
            arguments = [a.copy() for a in point]
            arguments[which] += side * reach * move
            moved = moved + side * weight * (arguments[which] - point[which])
            change = change + side * weight * forward(*arguments)[0]
    return moved, change


def _relative_error(analytic, numerical):
    """|a - n| / max(|a|, |n|, 1e-12) in the 2-norm; a NaN counts as infinitely wrong."""
    norm = np.linalg.norm
    error = norm(analytic - numerical) / max(norm(analytic), norm(numerical), 1e-12)
    return float(error) if np.isfinite(error) else math.inf


def _normalise(rows, eps):
    """(x - mean) / sqrt(var + eps) and sqrt(var + eps), in float64, for rows of shape (n, D).

    The first element of each row is subtracted before the mean is taken: a constant row then gives
    exact zeros and a common offset costs no digits. Rows beyond 2**400 are scaled down by a power of
    two first, and `hypot` adds the squares of the deviation and of sqrt(eps) without overflow.
    """
    rows = rows.astype(np.float64)
    exponent = np.frexp(np.abs(rows).max(axis=1, keepdims=True))[1]
    shrink = np.ldexp(1.0, -np.maximum(exponent - 400, 0))
    rows *= shrink
    rows -= rows[:, :1].copy()
    rows -= rows.mean(axis=1, keepdims=True)
    spread = np.sqrt((rows * rows).mean(axis=1, keepdims=True))
    deviation = np.hypot(spread / shrink, math.sqrt(eps))
    rows /= np.maximum(deviation * shrink, np.finfo(np.float64).tiny)
    return rows, deviation


def _as_rows(array):
    """The array as (B * T, D), a view where that is possible (always, if it is contiguous)."""
    return array.reshape(array.shape[0] * array.shape[1], array.shape[2])


def _blocks(rows):
    """Slices that cut the rows into blocks of about BLOCK numbers."""
    height = max(1, BLOCK // rows.shape[1])
    return [slice(first, first + height) for first in range(0, rows.shape[0], height)]


def _checked_inputs(x, gamma, beta):
    """x, gamma and beta as arrays whose shapes and dtypes agree."""
    x = _checked_array("x", x)
    if x.ndim != 3 or x.shape[2] < 1:
        raise ValueError(f"x must have shape (B, T, D) with D >= 1, not {x.shape}")
    gamma = _checked_array("gamma", gamma, x.shape[2:], x.dtype)
    beta = _checked_array("beta", beta, x.shape[2:], x.dtype)
    return x, gamma, beta


def _checked_array(name, value, shape=None, dtype=None):
    """The value as an array of float32 or float64, of this shape and dtype where they are given."""
    array = np.asarray(value)
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} like x, not {array.dtype}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
    return array


def _checked_eps(eps):
    """eps as a Python float."""
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"eps must be a number, not {type(eps).__name__}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, not {eps}")
    return float(eps)
