"""Layer normalisation over the last axis: forward, backward, gradient check.

The cache keeps x itself, exactly; the backward pass recomputes the statistics of a block of rows in float64 while it is
in the CPU cache anyway. So nothing of x is rounded between the passes, whatever the dtype.
"""

import math

import numpy as np

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_BLOCK_ELEMENTS = 1 << 15
_DIRECTIONS = 8
_RELATIVE_STEP = 3e-5


# ------------------------------------------------------------------ checks

def _check_array(a, name, shape, dtype=None):
    if not isinstance(a, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array")
    if a.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32 or float64")
    if dtype is not None and a.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {a.dtype}")
    if shape is not None and a.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {a.shape}")


def _check_inputs(x, gamma, beta):
    _check_array(x, "x", None)
    if x.ndim != 3 or x.shape[2] < 1:
        raise ValueError("x must have shape (B, T, D) with D at least 1")
    _check_array(gamma, "gamma", x.shape[2:], x.dtype)
    _check_array(beta, "beta", x.shape[2:], x.dtype)


def _check_eps(eps):
    if isinstance(eps, (bool, np.bool_)) or not isinstance(eps, (int, float, np.integer, np.floating)):
        raise TypeError("eps must be a number")
    if not math.isfinite(eps) or eps <= 0:
        raise ValueError("eps must be positive and finite")
    return float(eps)


# ------------------------------------------------------------------ a block of rows

def _blocks(rows, width):
    """Slices that cut the rows into blocks of about _BLOCK_ELEMENTS elements."""
    step = max(1, _BLOCK_ELEMENTS // width)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _normalise(block, eps):
    """(xhat, sigma, unit) of rows (R, D) in float64; the standard deviation is sigma * unit.

    Rows above 1 are scaled by a power of two, so that no square overflows. The first element is subtracted before the
    mean is taken: a constant row becomes exactly zero, and a large common offset costs no digits.
    """
    x = block.astype(np.float64)
    exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True))[1] - 1
    exponent = np.maximum(exponent, 0)
    x = np.ldexp(x, -exponent)
    x -= x[:, :1].copy()
    x -= x.mean(axis=1, keepdims=True)
    var = np.square(x).mean(axis=1, keepdims=True)
    unit = np.ldexp(1.0, exponent)
    sigma = np.sqrt(var + eps / unit / unit)
    x /= sigma
    return x, sigma, unit


# ------------------------------------------------------------------ entry points

def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _check_inputs(x, gamma, beta)
    eps = _check_eps(eps)
    width = x.shape[2]
    kept = np.array(x, order="C", copy=True)
    rows = kept.reshape(-1, width)
    y = np.empty_like(rows)
    for part in _blocks(len(rows), width):
        xhat, _, _ = _normalise(rows[part], eps)
        y[part] = xhat * gamma + beta
    cache = {"x": kept, "gamma": np.array(gamma, order="C", copy=True), "eps": eps}
    return y.reshape(x.shape), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache["x"], cache["gamma"], float(cache["eps"])
    _check_array(dy, "dy", x.shape, x.dtype)
    width = x.shape[2]
    rows = x.reshape(-1, width)
    up = np.ascontiguousarray(dy).reshape(-1, width)
    dx = np.empty_like(rows)
    dgamma = np.zeros(width)
    dbeta = np.zeros(width)
    for part in _blocks(len(rows), width):
        xhat, sigma, unit = _normalise(rows[part], eps)
        g = up[part].astype(np.float64)
        dbeta += g.sum(axis=0)
        dgamma += (g * xhat).sum(axis=0)
        g *= gamma
        g -= g.mean(axis=1, keepdims=True)
        g -= xhat * (g * xhat).mean(axis=1, keepdims=True)
        g /= sigma
        dx[part] = g / unit
    return dx.reshape(x.shape), dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Each error compares derivatives along a few random directions that move every element; the differences use the central
    five-point formula, and outputs are subtracted element by element before they are summed.
    """
    if not callable(forward) or not callable(backward):
        raise TypeError("forward and backward must be callable")
    _check_inputs(x, gamma, beta)
    _check_array(x, "x", x.shape, np.dtype(np.float64))
    _check_array(dy, "dy", x.shape, x.dtype)
    inputs = {"dx": x, "dgamma": gamma, "dbeta": beta}
    _, cache = forward(x.copy(), gamma.copy(), beta.copy())
    analytic = dict(zip(inputs, backward(dy.copy(), cache)))
    rng = np.random.default_rng(20240229)
    return {
        name: _direction_error(forward, inputs, name, np.asarray(analytic[name]), dy, rng) for name in inputs
    }


def _direction_error(forward, inputs, name, analytic, dy, rng):
    base = inputs[name]
    if analytic.shape != base.shape or not np.all(np.isfinite(analytic)):
        return math.inf
    step = _RELATIVE_STEP * _scale(base, name)
    along, numerical = [], []
    for _ in range(_DIRECTIONS):
        direction = rng.uniform(0.5, 1.5, base.shape) * rng.choice([-1.0, 1.0], base.shape)

        def output(distance):
            moved = {key: value.copy() for key, value in inputs.items()}
            moved[name] += distance * direction
            return forward(*moved.values())[0]

        near = output(step) - output(-step)
        far = output(2 * step) - output(-2 * step)
        numerical.append(np.sum(dy * (8 * near - far)) / (12 * step))
        along.append(np.sum(analytic * direction))
    return _relative_error(np.array(along), np.array(numerical))


def _scale(a, name):
    """The size of the changes that matter: the spread of the rows of x, the magnitude of gamma and beta."""
    if a.size == 0:
        return 1.0
    if name == "dx":
        a = a - a.mean(axis=-1, keepdims=True)
    size = math.sqrt(np.mean(np.square(a)))
    return size if size > 1e-3 else 1.0


def _relative_error(a, n):
    error = float(np.linalg.norm(a - n) / max(np.linalg.norm(a), np.linalg.norm(n), 1e-12))
    return error if math.isfinite(error) else math.inf
