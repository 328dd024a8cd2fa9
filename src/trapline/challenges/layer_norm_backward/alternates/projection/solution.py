"""Layer norm as geometry: dx is g with two directions projected out, all in the input's own dtype.

Statistics are a Welford recurrence over the features, on rows scaled by their largest element, so
that float32 rows of any size neither overflow nor lose their spread. The gradient check stacks all
shifted copies of x on the batch axis and needs a single forward call for them.
"""

import numpy as np


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    _refuse(x, gamma, beta, eps)
    rows = x.reshape(-1, x.shape[-1])
    scale = np.max(np.abs(rows), axis=1, keepdims=True, initial=1)  # (N, 1)
    rows = rows / scale
    mean, var = _welford(rows)
    # var + eps = scale² · (var of the scaled row + eps / scale²), without squaring the scale or
    # eps / scale², which float32 would lose beside a variance of 0.
    root = np.hypot(np.sqrt(var), np.sqrt(x.dtype.type(eps)) / scale)
    rstd = 1 / root / scale
    unit = (rows - mean) / root
    unit -= unit.mean(axis=1, keepdims=True)
    y = unit * gamma + beta
    cache = (unit.reshape(x.shape), rstd.reshape(x.shape[:2]), np.copy(gamma))
    return y.reshape(x.shape).astype(x.dtype, copy=False), cache


def layer_norm_backward(dy, cache):
    unit, rstd, gamma = cache
    if not isinstance(dy, np.ndarray) or not np.issubdtype(dy.dtype, np.floating):
        raise TypeError("dy must be a floating array")
    if dy.shape != unit.shape:
        raise ValueError(f"dy {dy.shape} does not match the cache {unit.shape}")
    width = dy.shape[-1]
    flat_dy, flat_unit = dy.reshape(-1, width), unit.reshape(-1, width)
    g = flat_dy * gamma
    ones = np.ones(width, dy.dtype)
    along_ones = (g @ ones / width)[:, None]
    along_unit = np.einsum("nd,nd->n", g, flat_unit)[:, None] / width
    dx = (g - along_ones - flat_unit * along_unit) * rstd.reshape(-1, 1)
    dgamma = np.sum(flat_dy * flat_unit, axis=0, dtype=np.float64)
    dbeta = np.sum(flat_dy, axis=0, dtype=np.float64)
    return dx.reshape(dy.shape).astype(dy.dtype), dgamma.astype(dy.dtype), dbeta.astype(dy.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    grads = backward(dy, forward(x, gamma, beta)[1])
    rng = np.random.default_rng()
    numeric_and_analytic = {
        "dx": _x_directions(forward, grads[0], x, gamma, beta, dy, rng),
        "dgamma": _directions(lambda g: forward(x, g, beta)[0], grads[1], gamma, dy, rng),
        "dbeta": _directions(lambda b: forward(x, gamma, b)[0], grads[2], beta, dy, rng),
    }
    return {name: _relative(*pair) for name, pair in numeric_and_analytic.items()}


def _x_directions(forward, dx, x, gamma, beta, dy, rng, count=5, step=4e-6):
    spread = x.std() + 1e-2 if x.size else 1.0
    v = rng.normal(size=(count, *x.shape)) * spread
    stacked = np.concatenate([x + step * v, x - step * v]).reshape(-1, *x.shape[1:])
    y = forward(stacked, gamma, beta)[0].reshape(2, count, *x.shape)
    numeric = np.sum((y[0] - y[1]) * dy, axis=(1, 2, 3)) / (2 * step)
    return numeric, np.sum(v * dx, axis=(1, 2, 3))


def _directions(function, gradient, value, dy, rng, count=5, step=1e-4):
    pairs = []
    for _ in range(count):
        v = rng.normal(size=value.shape)
        change = function(value + step * v) - function(value - step * v)
        pairs.append((np.sum(change * dy) / (2 * step), np.sum(v * gradient)))
    return tuple(np.array(column) for column in zip(*pairs, strict=True))


def _relative(numeric, analytic):
    size = max(np.linalg.norm(numeric), np.linalg.norm(analytic), 1e-12)
    return np.linalg.norm(numeric - analytic) / size


def _welford(rows):
    """Mean and biased variance of every row, one feature at a time: (N, 1) each."""
    mean = np.zeros((rows.shape[0], 1), rows.dtype)
    squares = np.zeros_like(mean)
    for seen in range(rows.shape[1]):
        value = rows[:, seen : seen + 1]
        delta = value - mean
        mean = mean + delta / (seen + 1)
        squares = squares + delta * (value - mean)
    return mean, squares / rows.shape[1]


def _refuse(x, gamma, beta, eps):
    if any(not isinstance(a, np.ndarray) for a in (x, gamma, beta)):
        raise TypeError("arrays expected")
    if any(not np.issubdtype(a.dtype, np.floating) for a in (x, gamma, beta)):
        raise TypeError("floating arrays expected")
    if np.ndim(x) != 3:
        raise ValueError("x must be (B, T, D)")
    if np.shape(gamma) != np.shape(x)[-1:] or np.shape(beta) != np.shape(x)[-1:]:
        raise ValueError("gamma and beta must be (D,)")
    if not (eps > 0 and eps < float("inf")):
        raise ValueError("eps must be a positive finite number")
