"""Layer norm by the chain rule, one node of the graph at a time, in the dtype of the inputs.

The cache keeps x itself (a copy), the row means and the reciprocal deviations. float32 sums are
taken in float64. The gradient check moves one feature of every row at once: rows are independent,
so 2·D calls give every element of dx.
"""

import math

import numpy as np


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    _validate(x, gamma, beta, eps)
    width = x.shape[2]
    wide = np.array(x, dtype=np.float64)
    mean = wide.sum(axis=2) / width
    # The mean as stored is rounded to x's dtype; everything below uses the stored one.
    mean = mean.astype(x.dtype)
    centred = wide - mean[:, :, None]
    rest = centred.sum(axis=2, keepdims=True) / width
    var = ((centred - rest) ** 2).sum(axis=2) / width
    rstd = np.power(var + eps, -0.5)
    y = (centred - rest) * rstd[:, :, None] * gamma + beta
    cache = {
        "x": np.array(x, order="C"),
        "mean": mean,
        "rstd": rstd.astype(x.dtype),
        "gamma": np.array(gamma),
    }
    return y.astype(x.dtype), cache


def layer_norm_backward(dy, cache):
    x, mean, rstd, gamma = cache["x"], cache["mean"], cache["rstd"], cache["gamma"]
    if not isinstance(dy, np.ndarray) or dy.dtype.kind != "f":
        raise TypeError("dy must be a float array")
    if dy.shape != x.shape:
        raise ValueError("dy must have the shape of x")
    width = x.shape[2]
    centred = x.astype(np.float64) - mean[:, :, None]
    centred -= centred.mean(axis=2, keepdims=True)
    r = rstd.astype(np.float64)[:, :, None]
    x_hat = centred * r
    upstream = dy.astype(np.float64)

    dbeta = np.einsum("btd->d", upstream)
    dgamma = np.einsum("btd,btd->d", upstream, x_hat)
    dx_hat = np.einsum("btd,d->btd", upstream, gamma)
    # x_hat = centred · r, r = (var + eps)^(−1/2), var = mean(centred²), centred = x − mean(x)
    dr = np.einsum("btd,btd->bt", dx_hat, centred)[:, :, None]
    dvar = -0.5 * dr * r**3
    dcentred = dx_hat * r + dvar * centred * (2.0 / width)
    dmean = -dcentred.sum(axis=2, keepdims=True)
    dx = dcentred + dmean / width
    return dx.astype(x.dtype), dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    _, cache = forward(x, gamma, beta)
    dx, dgamma, dbeta = backward(dy, cache)
    by_feature = {
        "dx": _columns(lambda moved: forward(moved, gamma, beta)[0], x, dy, keep_rows=True),
        "dgamma": _columns(lambda moved: forward(x, moved, beta)[0], gamma, dy, keep_rows=False),
        "dbeta": _columns(lambda moved: forward(x, gamma, moved)[0], beta, dy, keep_rows=False),
    }
    analytic = {"dx": dx, "dgamma": dgamma, "dbeta": dbeta}
    return {name: _error(analytic[name], by_feature[name]) for name in analytic}


def _columns(forward, value, dy, *, keep_rows):
    """Central differences in one feature of all rows at a time."""
    numeric = np.zeros(value.shape)
    for feature in range(value.shape[-1]):
        step = 5e-6 * max(1e-2, float(np.std(value)) if value.size else 0.0)
        ahead, behind = value.copy(), value.copy()
        ahead[..., feature] += step
        behind[..., feature] -= step
        change = dy * (forward(ahead) - forward(behind)) / (2 * step)
        numeric[..., feature] = change.sum(axis=2) if keep_rows else change.sum()
    return numeric


def _error(analytic, numeric):
    difference = math.sqrt(float(((analytic - numeric) ** 2).sum()))
    sizes = (math.sqrt(float((part**2).sum())) for part in (analytic, numeric))
    return difference / max(*sizes, 1e-12)


def _validate(x, gamma, beta, eps):
    for array in (x, gamma, beta):
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise TypeError("x, gamma and beta must be float arrays")
    if x.ndim != 3 or gamma.shape != x.shape[2:] or beta.shape != x.shape[2:]:
        raise ValueError("expected x (B, T, D), gamma (D,) and beta (D,)")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError("eps must be positive and finite")
