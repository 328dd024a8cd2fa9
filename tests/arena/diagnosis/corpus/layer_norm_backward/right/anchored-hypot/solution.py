"""Layer normalisation over the last axis: forward, backward, gradient check.

Every row is measured from an anchor, its own first feature: the differences to it are free of the
row's offset, so a constant row is exactly zero and a mean of 1e8 costs no digits. The arithmetic is
float64 throughout and runs over panels of rows, so the wide temporaries stay small. The cache holds
what went in (x, gamma and eps); the backward pass measures the rows again.
"""

import math
import numbers

import numpy as np

PANEL_ELEMENTS = 1 << 15
DIRECTIONS = 8
RELATIVE_STEP = 2.0**-12
SMALLEST_SPREAD = 2.0**-8


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _require_arrays(x, gamma, beta)
    eps = _positive_number(eps)
    features = x.shape[-1]
    rows = x.reshape(-1, features)
    scale = gamma.astype(np.float64)
    shift = beta.astype(np.float64)
    y = np.empty(rows.shape, x.dtype)
    for panel in _panels(len(rows), features):
        normal, _ = _normalise(rows[panel], eps)
        normal *= scale
        normal += shift
        y[panel] = normal
    cache = {"x": np.array(x, order="C"), "gamma": gamma.copy(), "eps": eps}
    return y.reshape(x.shape), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache["x"], cache["gamma"], float(cache["eps"])
    _require_float("dy", dy)
    _require_like("dy", dy, x.shape, x.dtype)
    features = x.shape[-1]
    rows = x.reshape(-1, features)
    pulls = dy.reshape(-1, features)
    scale = gamma.astype(np.float64)
    dx = np.empty(rows.shape, x.dtype)
    dgamma = np.zeros(features)
    dbeta = np.zeros(features)
    for panel in _panels(len(rows), features):
        normal, deviation = _normalise(rows[panel], eps)
        slope = pulls[panel].astype(np.float64)
        dbeta += slope.sum(axis=0)
        dgamma += (slope * normal).sum(axis=0)
        slope *= scale
        along = (slope * normal).mean(axis=1, keepdims=True)
        slope -= slope.mean(axis=1, keepdims=True)
        slope -= normal * along
        slope /= deviation
        dx[panel] = slope
    return dx.reshape(x.shape), dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Each input is moved along random directions, every element at once, by a four-point stencil. Steps
    are powers of two times +-1 or +-2, so that adding them to the input rounds as little as it can.
    """
    _require_arrays(x, gamma, beta)
    _require_float("dy", dy)
    _require_like("dy", dy, x.shape, np.dtype(np.float64))
    point = {"dx": x, "dgamma": gamma, "dbeta": beta}
    steps = {
        "dx": _input_step(x),
        "dgamma": _parameter_step(gamma),
        "dbeta": _parameter_step(beta),
    }
    _, cache = forward(*(value.copy() for value in point.values()))
    gradients = dict(zip(point, backward(dy.copy(), cache), strict=True))
    rng = np.random.default_rng(20240917)
    errors = {}
    for name, value in point.items():
        gradient = np.asarray(gradients[name])
        if gradient.shape != value.shape:
            errors[name] = math.inf
            continue
        analytic = np.zeros(DIRECTIONS)
        numerical = np.zeros(DIRECTIONS)
        for index in range(DIRECTIONS):
            direction = rng.choice((-2.0, -1.0, 1.0, 2.0), size=value.shape)
            analytic[index] = np.sum(gradient * direction)
            numerical[index] = _slope_along(forward, point, name, steps[name] * direction, dy) / steps[name]
        errors[name] = _relative_error(analytic, numerical)
    return errors


def _slope_along(forward, point, name, move, dy):
    """The derivative of sum(dy * y) at 0 of the line point[name] + s * move, to fourth order."""
    difference = np.zeros(dy.shape)
    for distance, weight in ((1.0, 8.0), (-1.0, -8.0), (2.0, -1.0), (-2.0, 1.0)):
        moved = {key: value.copy() for key, value in point.items()}
        moved[name] += distance * move
        y, _ = forward(*moved.values())
        difference += weight * y
    return np.sum(dy * difference) / 12.0


def _relative_error(analytic, numerical):
    """|a - n| / max(|a|, |n|, 1e-12); infinite where one of the two is not a finite number."""
    if not (np.isfinite(analytic).all() and np.isfinite(numerical).all()):
        return math.inf
    size = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
    return float(np.linalg.norm(analytic - numerical) / size)


def _input_step(x):
    """A power of two, small beside the spread of the narrowest row of x."""
    spread = x.std(axis=-1).min() if x.size else 1.0
    return RELATIVE_STEP * _power_of_two(max(spread, SMALLEST_SPREAD))


def _parameter_step(values):
    """A power of two, small beside the largest of the values or 1."""
    return RELATIVE_STEP * _power_of_two(max(1.0, np.abs(values).max()))


def _power_of_two(number):
    return math.ldexp(1.0, math.frexp(number)[1] - 1)


def _panels(count, features):
    """Slices that cut `count` rows of `features` elements into panels."""
    height = max(1, PANEL_ELEMENTS // features)
    for start in range(0, count, height):
        yield slice(start, start + height)


def _normalise(rows, eps):
    """The normalised rows and the column sqrt(var + eps), both in float64.

    The spread is taken in units of the row's largest deviation, so that no square leaves the range.
    """
    wide = rows.astype(np.float64)
    wide -= wide[:, :1].copy()
    wide -= wide.mean(axis=1, keepdims=True)
    peak = np.abs(wide).max(axis=1, keepdims=True)
    peak[peak == 0.0] = 1.0
    spread = peak * np.sqrt(np.square(wide / peak).mean(axis=1, keepdims=True))
    deviation = np.hypot(spread, math.sqrt(eps))
    wide /= deviation
    return wide, deviation


def _require_arrays(x, gamma, beta):
    _require_float("x", x)
    _require_float("gamma", gamma)
    _require_float("beta", beta)
    if x.ndim != 3 or x.shape[-1] < 1:
        raise ValueError(f"x must have the shape (B, T, D) with D >= 1, not {x.shape}")
    _require_like("gamma", gamma, x.shape[-1:], x.dtype)
    _require_like("beta", beta, x.shape[-1:], x.dtype)


def _require_float(name, array):
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array")
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")


def _require_like(name, array, shape, dtype):
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {array.dtype}")


def _positive_number(eps):
    """eps as a float, where it is a positive finite number."""
    if not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a real number")
    try:
        value = float(eps)
    except OverflowError:
        value = math.inf
    if not 0.0 < value < math.inf:
        raise ValueError("eps must be positive and finite")
    return value
