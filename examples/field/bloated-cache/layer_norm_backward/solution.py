"""Layer normalization with full bookkeeping: everything the forward pass computed is kept."""

import numpy as np

DIRECTIONS = 8


def _validate(x, gamma, beta, eps):
    for name, value in (("x", x), ("gamma", gamma), ("beta", beta)):
        if not isinstance(value, np.ndarray) or value.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} must be a float32 or float64 array")
    if x.ndim != 3:
        raise ValueError(f"x must be three-dimensional, got {x.ndim} dimensions")
    if gamma.shape != (x.shape[-1],):
        raise ValueError(f"gamma must have shape {(x.shape[-1],)}, got {gamma.shape}")
    if beta.shape != (x.shape[-1],):
        raise ValueError(f"beta must have shape {(x.shape[-1],)}, got {beta.shape}")
    if not np.isfinite(eps) or eps <= 0:
        raise ValueError(f"eps must be positive, got {eps}")


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """Forward pass. The cache contains all intermediates so that backward never recomputes."""
    _validate(x, gamma, beta, eps)
    B, T, D = x.shape
    wide = x.astype(np.float64)
    mean = wide.mean(axis=-1)
    x_centered = wide - mean[..., np.newaxis]
    var = np.mean(x_centered**2, axis=-1)
    std = np.sqrt(var + eps)
    x_norm = x_centered / std[..., np.newaxis]
    y = gamma * x_norm + beta
    cache = {
        "x": x.copy(),
        "x_centered": x_centered.astype(x.dtype),
        "x_norm": x_norm.astype(x.dtype),
        "mean": mean.astype(x.dtype),
        "var": var.astype(x.dtype),
        "std": std.astype(x.dtype),
        "gamma": gamma.copy(),
        "beta": beta.copy(),
        "eps": float(eps),
        "B": B,
        "T": T,
        "D": D,
    }
    return y.astype(x.dtype), cache


def layer_norm_backward(dy, cache):
    """Backward pass: dz = dy * gamma, then the mean and the variance paths are removed."""
    if not isinstance(dy, np.ndarray) or dy.dtype not in (np.float32, np.float64):
        raise TypeError("dy must be a float32 or float64 array")
    x_norm, std, gamma, D = cache["x_norm"], cache["std"], cache["gamma"], cache["D"]
    if dy.shape != (cache["B"], cache["T"], D):
        raise ValueError(f"dy has shape {dy.shape}")
    wide = dy.astype(np.float64)
    dgamma = np.sum(wide * x_norm, axis=(0, 1))
    dbeta = np.sum(wide, axis=(0, 1))
    dz = wide * gamma
    sum_dz = np.sum(dz, axis=-1, keepdims=True)
    sum_dz_xnorm = np.sum(dz * x_norm, axis=-1, keepdims=True)
    dx = (dz - sum_dz / D - x_norm * sum_dz_xnorm / D) / std[..., np.newaxis]
    return dx.astype(dy.dtype), dgamma.astype(dy.dtype), dbeta.astype(dy.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy, step=1e-5):
    """Directional derivatives along random directions, all elements at once."""
    rng = np.random.default_rng(0)
    _, cache = forward(x, gamma, beta)
    gradients = dict(zip(("dx", "dgamma", "dbeta"), backward(dy, cache)))
    values = {"dx": x, "dgamma": gamma, "dbeta": beta}
    errors = {}
    for name, value in values.items():
        analytic = np.empty(DIRECTIONS)
        numeric = np.empty(DIRECTIONS)
        for i in range(DIRECTIONS):
            v = rng.uniform(0.5, 1.5, value.shape) * rng.choice([-1, 1], value.shape)
            plus = forward(*[w + step * v if n == name else w for n, w in values.items()])[0]
            minus = forward(*[w - step * v if n == name else w for n, w in values.items()])[0]
            numeric[i] = np.sum(dy * (plus - minus)) / (2 * step)
            analytic[i] = np.sum(gradients[name] * v)
        size = max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)
        errors[name] = float(np.linalg.norm(analytic - numeric) / size)
    return errors
