"""Layer normalisation feature by feature: Welford's online moments, all rows side by side."""

import math
import numbers

import numpy as np


def _is_float_array(a):
    return isinstance(a, np.ndarray) and a.dtype.kind == "f" and a.dtype.itemsize in (4, 8)


def _check(x, gamma, beta):
    if not (_is_float_array(x) and _is_float_array(gamma) and _is_float_array(beta)):
        raise TypeError("x, gamma and beta must be arrays of float32 or float64")
    if x.ndim != 3 or x.shape[2] == 0:
        raise ValueError("x must be (B, T, D) with D >= 1")
    if gamma.shape != x.shape[2:] or beta.shape != x.shape[2:]:
        raise ValueError("gamma and beta must be (D,)")


def _check_dy(dy, shape):
    if not _is_float_array(dy):
        raise TypeError("dy must be an array of float32 or float64")
    if dy.shape != shape:
        raise ValueError("dy must have the shape of x")


def _check_eps(eps):
    if isinstance(eps, complex) or not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a real number")
    if eps != eps or eps <= 0 or eps > 1.7976931348623157e308:
        raise ValueError("eps must be positive and finite")
    return float(eps)


def _columns(a):
    """The features of (B, T, D), each as a float64 (B, T)."""
    for j in range(a.shape[2]):
        yield j, a[:, :, j].astype(np.float64)


def _moments(x):
    """(first feature, mean relative to it, variance), each (B, T)."""
    origin = x[:, :, 0].astype(np.float64)
    mean = np.zeros(x.shape[:2])
    m2 = np.zeros(x.shape[:2])
    for j, column in _columns(x):
        column -= origin
        delta = column - mean
        mean += delta / (j + 1)
        m2 += delta * (column - mean)
    return origin, mean, m2 / x.shape[2]


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _check(x, gamma, beta)
    eps = _check_eps(eps)
    origin, mean, var = _moments(x)
    std = np.sqrt(var + eps)
    y = np.empty(x.shape, x.dtype)
    centred = np.empty(x.shape, x.dtype)
    for j, column in _columns(x):
        offset = (column - origin) - mean
        centred[:, :, j] = offset
        y[:, :, j] = float(gamma[j]) * (offset / std) + float(beta[j])
    cache = {
        "centred": centred,
        "spread": np.sqrt(var).astype(x.dtype, order="C"),
        "gamma": gamma.copy(),
        "eps": eps,
    }
    return y, cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    centred, gamma = cache["centred"], cache["gamma"]
    _check_dy(dy, centred.shape)
    depth = centred.shape[2]
    var = np.square(cache["spread"], dtype=np.float64)
    std = np.sqrt(var + cache["eps"])

    dgamma = np.empty(depth, centred.dtype)
    dbeta = np.empty(depth, centred.dtype)
    sum_g = np.zeros(centred.shape[:2])
    sum_gx = np.zeros(centred.shape[:2])
    for j, upstream in _columns(dy):
        xhat = centred[:, :, j] / std
        dgamma[j] = np.sum(upstream * xhat)
        dbeta[j] = np.sum(upstream)
        upstream *= float(gamma[j])
        sum_g += upstream
        sum_gx += upstream * xhat

    dx = np.empty(centred.shape, centred.dtype)
    for j, upstream in _columns(dy):
        xhat = centred[:, :, j] / std
        dx[:, :, j] = (float(gamma[j]) * upstream - (sum_g + xhat * sum_gx) / depth) / std
    return dx, dgamma, dbeta


def _compare(pairs):
    """Relative error of a list of (analytic, numerical)."""
    a = math.hypot(*(p[0] for p in pairs))
    n = math.hypot(*(p[1] for p in pairs))
    gap = math.hypot(*(p[0] - p[1] for p in pairs))
    error = gap / max(a, n, 1e-12)
    return math.inf if math.isnan(error) else error


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error}, along random directions with entries in +-[0.5, 1.5]."""  # noqa: E501
    _check(x, gamma, beta)
    _check_dy(dy, x.shape)
    step = 1e-5
    generator = np.random.default_rng(1)
    point = {"dx": x, "dgamma": gamma, "dbeta": beta}

    _, cache = forward(x.copy(), gamma.copy(), beta.copy())
    found = dict(
        zip(
            point, [np.array(g, dtype=np.float64) for g in backward(dy.copy(), cache)], strict=False
        )
    )

    def output(name, change):
        arguments = {key: value.copy() for key, value in point.items()}
        arguments[name] = arguments[name] + change
        return np.array(forward(arguments["dx"], arguments["dgamma"], arguments["dbeta"])[0])

    errors = {}
    for name, value in point.items():
        if found[name].shape != value.shape:
            errors[name] = math.inf
            continue
        pairs = []
        for _ in range(12):
            v = generator.uniform(0.5, 1.5, value.shape) * generator.choice(
                (-1.0, 1.0), value.shape
            )
            change = output(name, step * v) - output(name, -step * v)
            pairs.append((float((found[name] * v).sum()), float((dy * change).sum()) / (2 * step)))
        errors[name] = _compare(pairs)
    return errors
