"""Layer normalisation, one row at a time. The cache keeps the input; backward recomputes the rest."""  # noqa: E501

import math
import numbers

import numpy as np

STEP = 1e-5
DIRECTIONS = 8


def _require_array(name, array, rank):
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array")
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, not {array.ndim}")


def _require_inputs(x, gamma, beta):
    _require_array("x", x, 3)
    _require_array("gamma", gamma, 1)
    _require_array("beta", beta, 1)
    if x.shape[2] < 1:
        raise ValueError("x needs at least one feature")
    if gamma.shape[0] != x.shape[2] or beta.shape[0] != x.shape[2]:
        raise ValueError("gamma and beta must have one entry per feature")


def _require_eps(eps):
    if not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a number")
    try:
        value = float(eps)
    except OverflowError:
        raise ValueError("eps is too large") from None
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError("eps must be positive and finite")
    return value


def _normalise_row(values, eps):
    """(normalised row, 1 / std) in float64."""
    row = values.astype(np.float64)
    row -= row[0]  # exact zeros for a constant row, no cancellation for a large mean
    row -= row.sum() / row.size
    variance = row.dot(row) / row.size
    rstd = 1.0 / math.sqrt(variance + eps)
    return row * rstd, rstd


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _require_inputs(x, gamma, beta)
    eps = _require_eps(eps)
    scale = gamma.astype(np.float64)
    shift = beta.astype(np.float64)
    y = np.empty(x.shape, dtype=x.dtype)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            xhat, _ = _normalise_row(x[b, t], eps)
            y[b, t] = scale * xhat + shift
    return y, {"x": x.copy(), "gamma": gamma.copy(), "eps": eps}


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x = cache["x"]
    eps = float(cache["eps"])
    _require_array("dy", dy, 3)
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {dy.shape}, the forward pass had {x.shape}")
    features = x.shape[2]
    scale = cache["gamma"].astype(np.float64)
    dx = np.empty(x.shape, dtype=x.dtype)
    dgamma = np.zeros(features)
    dbeta = np.zeros(features)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            xhat, rstd = _normalise_row(x[b, t], eps)
            upstream = dy[b, t].astype(np.float64)
            dgamma += upstream * xhat
            dbeta += upstream
            g = upstream * scale
            along = g.dot(xhat) / features
            g -= g.sum() / features
            dx[b, t] = rstd * (g - xhat * along)
    return dx, dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def _norm(values):
    return math.hypot(*values)


def _relative_error(analytic, numerical):
    gap = _norm([a - n for a, n in zip(analytic, numerical, strict=False)])
    error = gap / max(_norm(analytic), _norm(numerical), 1e-12)
    return error if math.isfinite(error) else math.inf


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} along random sign vectors."""
    _require_inputs(x, gamma, beta)
    _require_array("dy", dy, 3)
    if dy.shape != x.shape:
        raise ValueError("dy must have the shape of x")
    inputs = [np.array(x), np.array(gamma), np.array(beta)]
    _, cache = forward(*[a.copy() for a in inputs])
    gradients = [np.array(g, dtype=np.float64) for g in backward(dy.copy(), cache)]
    rng = np.random.default_rng(20240131)
    report = {}
    for slot, name in enumerate(("dx", "dgamma", "dbeta")):
        if gradients[slot].shape != inputs[slot].shape:
            report[name] = math.inf
            continue
        analytic, numerical = [], []
        for _ in range(DIRECTIONS):
            direction = rng.choice([-1.0, 1.0], size=inputs[slot].shape)
            ends = []
            for sign in (1.0, -1.0):
                moved = [a.copy() for a in inputs]
                moved[slot] += sign * STEP * direction
                ends.append(np.array(forward(*moved)[0]))
            analytic.append(float(np.sum(gradients[slot] * direction)))
            numerical.append(float(np.sum(dy * (ends[0] - ends[1]))) / (2.0 * STEP))
        report[name] = _relative_error(analytic, numerical)
    return report
