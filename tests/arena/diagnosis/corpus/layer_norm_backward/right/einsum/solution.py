"""Layer normalisation with every contraction written as an einsum."""

import math
from numbers import Real

import numpy as np


def _validate(dtype_of, **expected):
    """Every keyword is name=(array, shape), where None in a shape stands for any length."""
    for name, (array, shape) in expected.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is not an array")
        if array.dtype != np.float32 and array.dtype != np.float64:
            raise TypeError(f"{name} has dtype {array.dtype}; float32 or float64 is needed")
        if array.ndim != len(shape) or any(
            w is not None and n != w for n, w in zip(array.shape, shape, strict=False)
        ):
            raise ValueError(f"{name} has shape {array.shape}; {shape} is needed")
    return dtype_of.dtype


def _depth(x):
    depth = x.shape[-1] if isinstance(x, np.ndarray) and x.ndim == 3 else None
    if depth == 0:
        raise ValueError("the last axis is empty")
    return depth


def _eps(eps):
    if not isinstance(eps, Real):
        raise TypeError("eps must be a real number")
    if not (eps > 0 and eps <= np.finfo(float).max):
        raise ValueError("eps must be positive and finite")
    return float(eps)


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    depth = _depth(x)
    dtype = _validate(x, x=(x, (None, None, depth)), gamma=(gamma, (depth,)), beta=(beta, (depth,)))
    eps = _eps(eps)
    centred = np.subtract(x, x[:, :, :1], dtype=np.float64)
    centred -= np.einsum("btd->bt", centred)[:, :, None] / depth
    var = np.einsum("btd,btd->bt", centred, centred) / depth
    xhat = np.einsum("btd,bt->btd", centred, 1.0 / np.sqrt(var + eps))
    y = np.einsum("btd,d->btd", xhat, gamma.astype(np.float64)) + beta
    cache = (
        xhat.astype(dtype, order="C"),
        np.sqrt(var).astype(dtype, order="C"),
        gamma.copy(),
        eps,
    )
    return y.astype(dtype), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    xhat, spread, gamma, eps = cache
    dtype = xhat.dtype
    _validate(xhat, dy=(dy, xhat.shape))
    depth = gamma.shape[0]
    dy, xhat, gamma = (a.astype(np.float64) for a in (dy, xhat, gamma))
    rstd = 1.0 / np.sqrt(spread.astype(np.float64) ** 2 + eps)
    mean_g = np.einsum("btd,d->bt", dy, gamma) / depth
    mean_gx = np.einsum("btd,d,btd->bt", dy, gamma, xhat) / depth
    dx = np.einsum("btd,d->btd", dy, gamma)
    dx -= mean_g[:, :, None]
    dx -= np.einsum("btd,bt->btd", xhat, mean_gx)
    dx = np.einsum("btd,bt->btd", dx, rstd)
    dgamma = np.einsum("btd,btd->d", dy, xhat)
    dbeta = np.einsum("btd->d", dy)
    return dx.astype(dtype), dgamma.astype(dtype), dbeta.astype(dtype)


def _error(analytic, numerical):
    size = [
        math.sqrt(np.einsum("i,i->", v, v)) for v in (analytic, numerical, analytic - numerical)
    ]
    error = size[2] / max(size[0], size[1], 1e-12)
    return error if math.isfinite(error) else math.inf


def gradient_check(forward, backward, x, gamma, beta, dy):
    """Errors of dx along random directions, of dgamma and dbeta over all their elements."""
    depth = _depth(x)
    _validate(
        x,
        x=(x, (None, None, depth)),
        gamma=(gamma, (depth,)),
        beta=(beta, (depth,)),
        dy=(dy, x.shape),
    )
    h = 1e-5

    def slope(vx, vgamma, vbeta):
        up = np.array(forward(x + h * vx, gamma + h * vgamma, beta + h * vbeta)[0])
        down = np.array(forward(x - h * vx, gamma - h * vgamma, beta - h * vbeta)[0])
        return np.einsum("btd,btd->", dy, up - down) / (2 * h)

    cache = forward(x.copy(), gamma.copy(), beta.copy())[1]
    dx, dgamma, dbeta = (np.array(g, dtype=np.float64) for g in backward(dy.copy(), cache))
    rng = np.random.default_rng(99)
    signs = [rng.integers(0, 2, size=x.shape) * 2.0 - 1.0 for _ in range(10)]
    still_x, still_d, basis = np.zeros(x.shape), np.zeros(depth), np.eye(depth)
    result = {"dx": math.inf, "dgamma": math.inf, "dbeta": math.inf}
    if dx.shape == x.shape:
        analytic = np.array([np.einsum("btd,btd->", dx, v) for v in signs])
        result["dx"] = _error(analytic, np.array([slope(v, still_d, still_d) for v in signs]))
    if dgamma.shape == (depth,):
        result["dgamma"] = _error(dgamma, np.array([slope(still_x, e, still_d) for e in basis]))
    if dbeta.shape == (depth,):
        result["dbeta"] = _error(dbeta, np.array([slope(still_x, still_d, e) for e in basis]))
    return result
