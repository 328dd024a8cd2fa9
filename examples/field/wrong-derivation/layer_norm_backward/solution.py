"""Layer normalization; backward as Jacobian of the normalization times the upstream gradient."""

import math

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    if not all(isinstance(a, np.ndarray) and a.dtype in FLOATS for a in (x, gamma, beta)):
        raise TypeError("x, gamma and beta must be float32 or float64 arrays")
    if x.ndim != 3 or gamma.shape != x.shape[-1:] or beta.shape != x.shape[-1:]:
        raise ValueError("shapes must be (B, T, D), (D,), (D,)")
    if not math.isfinite(eps) or eps <= 0:
        raise ValueError("eps must be positive and finite")
    wide = x.astype(np.float64)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    rstd = (np.square(centered).mean(axis=-1) + eps) ** -0.5
    x_hat = centered * rstd[..., None]
    y = x_hat * gamma + beta
    return y.astype(x.dtype), (x_hat.astype(x.dtype), rstd.astype(x.dtype), gamma.copy())


def layer_norm_backward(dy, cache):
    """dx = gamma * J dy, where J = rstd * (I - 1 1^T / D - x_hat x_hat^T / D)."""
    x_hat, rstd, gamma = cache
    if not isinstance(dy, np.ndarray) or dy.dtype not in FLOATS:
        raise TypeError("dy must be a float32 or float64 array")
    if dy.shape != x_hat.shape:
        raise ValueError("dy must have the shape of x")
    wide = dy.astype(np.float64)
    mean_dy = wide.mean(axis=-1, keepdims=True)
    mean_dyx = (wide * x_hat).mean(axis=-1, keepdims=True)
    dx = gamma * rstd[..., None] * (wide - mean_dy - x_hat * mean_dyx)
    dgamma = (wide * x_hat).sum(axis=(0, 1))
    dbeta = wide.sum(axis=(0, 1))
    return dx.astype(dy.dtype), dgamma.astype(dy.dtype), dbeta.astype(dy.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """Random directions; five of them for each input."""
    _, cache = forward(x, gamma, beta)
    grads = backward(dy, cache)
    rng = np.random.default_rng(11)
    errors = {}
    for name, grad, value, call in (
        ("dx", grads[0], x, lambda v: forward(v, gamma, beta)[0]),
        ("dgamma", grads[1], gamma, lambda v: forward(x, v, beta)[0]),
        ("dbeta", grads[2], beta, lambda v: forward(x, gamma, v)[0]),
    ):
        analytic, numeric = [], []
        for _ in range(5):
            v = rng.choice([-1.0, 1.0], value.shape)
            difference = call(value + 1e-5 * v) - call(value - 1e-5 * v)
            numeric.append(np.sum(dy * difference) / 2e-5)
            analytic.append(np.sum(grad * v))
        a, n = np.array(analytic), np.array(numeric)
        errors[name] = float(
            np.linalg.norm(a - n) / max(np.linalg.norm(a), np.linalg.norm(n), 1e-12)
        )
    return errors
