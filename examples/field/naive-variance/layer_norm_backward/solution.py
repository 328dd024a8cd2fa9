"""Layer normalization with a single-pass variance: one sweep collects sum and sum of squares."""

import numpy as np


def _require(condition, kind, message):
    if not condition:
        raise kind(message)


def _is_float(a):
    return isinstance(a, np.ndarray) and a.dtype in (np.float32, np.float64)


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    _require(_is_float(x) and _is_float(gamma) and _is_float(beta), TypeError, "float arrays only")
    _require(x.ndim == 3, ValueError, "x must be (B, T, D)")
    _require(gamma.shape == beta.shape == x.shape[2:], ValueError, "gamma, beta must be (D,)")
    _require(0 < eps < float("inf"), ValueError, "eps must be positive and finite")
    wide = x.astype(np.float64)
    D = x.shape[2]
    # One sweep: Var[x] = E[x^2] - E[x]^2
    s1 = np.einsum("btd->bt", wide) / D
    s2 = np.einsum("btd,btd->bt", wide, wide) / D
    rstd = 1.0 / np.sqrt(s2 - s1 * s1 + eps)
    x_hat = (wide - s1[:, :, None]) * rstd[:, :, None]
    y = x_hat * gamma + beta
    return y.astype(x.dtype), (x_hat.astype(x.dtype), rstd.astype(x.dtype), gamma.copy())


def layer_norm_backward(dy, cache):
    x_hat, rstd, gamma = cache
    _require(_is_float(dy), TypeError, "float arrays only")
    _require(dy.shape == x_hat.shape, ValueError, "dy must have the shape of x")
    wide = dy.astype(np.float64)
    g = wide * gamma
    D = dy.shape[2]
    proj = np.einsum("btd,btd->bt", g, x_hat)[:, :, None] / D
    dx = rstd[:, :, None] * (g - g.sum(axis=2, keepdims=True) / D - x_hat * proj)
    dgamma = np.einsum("btd,btd->d", wide, x_hat)
    dbeta = np.einsum("btd->d", wide)
    return dx.astype(dy.dtype), dgamma.astype(dy.dtype), dbeta.astype(dy.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    inputs = [x, gamma, beta]
    grads = backward(dy, forward(*inputs)[1])
    rng = np.random.default_rng(7)
    return {
        name: _error(forward, inputs, i, grads[i], dy, rng)
        for i, name in enumerate(["dx", "dgamma", "dbeta"])
    }


def _error(forward, inputs, i, grad, dy, rng, h=1e-5, count=6):
    a, n = [], []
    for _ in range(count):
        v = rng.choice([-1.0, 1.0], inputs[i].shape)
        hi, lo = list(inputs), list(inputs)
        hi[i] = inputs[i] + h * v
        lo[i] = inputs[i] - h * v
        n.append(((forward(*hi)[0] - forward(*lo)[0]) * dy).sum() / (2 * h))
        a.append((grad * v).sum())
    a, n = np.array(a), np.array(n)
    return float(np.linalg.norm(a - n) / max(np.linalg.norm(a), np.linalg.norm(n), 1e-12))
