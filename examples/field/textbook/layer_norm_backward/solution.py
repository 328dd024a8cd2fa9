"""Layer normalization, forward and backward, straight from the chain rule."""

import numpy as np


def _as_checked(name, array):
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array")
    if array.dtype != np.float32 and array.dtype != np.float64:
        raise TypeError(f"{name} must be float32 or float64")
    return array.astype(np.float64)


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """Normalize x (B, T, D) over D. The cache holds x_hat, 1/std and gamma."""
    x64 = _as_checked("x", x)
    gamma64 = _as_checked("gamma", gamma)
    beta64 = _as_checked("beta", beta)
    if x.ndim != 3:
        raise ValueError("x must have shape (B, T, D)")
    D = x.shape[2]
    if gamma.shape != (D,) or beta.shape != (D,):
        raise ValueError("gamma and beta must have shape (D,)")
    if not (eps > 0 and np.isfinite(eps)):
        raise ValueError("eps must be positive and finite")

    mu = x64.sum(axis=2, keepdims=True) / D
    centered = x64 - mu
    var = (centered**2).sum(axis=2, keepdims=True) / D
    inv_std = 1.0 / np.sqrt(var + eps)
    x_hat = centered * inv_std
    y = gamma64 * x_hat + beta64

    dtype = x.dtype
    cache = {
        "x_hat": x_hat.astype(dtype),
        "inv_std": inv_std[:, :, 0].astype(dtype),
        "gamma": gamma.copy(),
    }
    return y.astype(dtype), cache


def layer_norm_backward(dy, cache):
    """Gradients with respect to x, gamma and beta."""
    dy64 = _as_checked("dy", dy)
    x_hat = cache["x_hat"].astype(np.float64)
    inv_std = cache["inv_std"].astype(np.float64)[:, :, None]
    gamma = cache["gamma"].astype(np.float64)
    if dy.shape != x_hat.shape:
        raise ValueError("dy must have the shape of x")
    D = x_hat.shape[2]

    dbeta = dy64.sum(axis=1).sum(axis=0)
    dgamma = (dy64 * x_hat).sum(axis=1).sum(axis=0)

    dx_hat = dy64 * gamma
    # Through the variance and through the mean.
    along_x_hat = (dx_hat * x_hat).sum(axis=2, keepdims=True)
    along_ones = dx_hat.sum(axis=2, keepdims=True)
    dx = (inv_std / D) * (D * dx_hat - along_ones - x_hat * along_x_hat)

    dtype = dy.dtype
    return dx.astype(dtype), dgamma.astype(dtype), dbeta.astype(dtype)


def gradient_check(forward, backward, x, gamma, beta, dy, h=1e-5):
    """Central differences; rows are independent, so one feature of all rows moves at a time."""
    _, cache = forward(x, gamma, beta)
    dx, dgamma, dbeta = backward(dy, cache)
    D = x.shape[2]
    num_dx = np.zeros_like(x)
    num_dgamma = np.zeros_like(gamma)
    num_dbeta = np.zeros_like(beta)
    for d in range(D):
        unit = np.zeros(D)
        unit[d] = h
        diff = forward(x + unit, gamma, beta)[0] - forward(x - unit, gamma, beta)[0]
        num_dx[:, :, d] = (dy * diff).sum(axis=2) / (2 * h)
        diff = forward(x, gamma + unit, beta)[0] - forward(x, gamma - unit, beta)[0]
        num_dgamma[d] = (dy * diff).sum() / (2 * h)
        diff = forward(x, gamma, beta + unit)[0] - forward(x, gamma, beta - unit)[0]
        num_dbeta[d] = (dy * diff).sum() / (2 * h)
    return {
        "dx": _relative(dx, num_dx),
        "dgamma": _relative(dgamma, num_dgamma),
        "dbeta": _relative(dbeta, num_dbeta),
    }


def _relative(a, n):
    return float(np.linalg.norm(a - n) / max(np.linalg.norm(a), np.linalg.norm(n), 1e-12))
