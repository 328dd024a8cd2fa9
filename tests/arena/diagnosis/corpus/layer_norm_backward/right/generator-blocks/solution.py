"""Layer normalisation in blocks of rows, made of small pure functions."""

import math
from functools import reduce
from itertools import count, islice
from numbers import Real

import numpy as np

BLOCK = 64


def real_array(a):
    if not isinstance(a, np.ndarray) or a.dtype.type not in (np.float32, np.float64):
        raise TypeError("expected an array of float32 or float64")
    return a


def checked(x, gamma, beta):
    if real_array(x).ndim != 3 or x.shape[-1] < 1:
        raise ValueError("x must have shape (B, T, D), D >= 1")
    if real_array(gamma).shape != (x.shape[-1],) or real_array(beta).shape != (x.shape[-1],):
        raise ValueError("gamma and beta must have shape (D,)")


def checked_dy(dy, shape):
    if real_array(dy).shape != shape:
        raise ValueError("dy must have the shape of x")
    return dy


def checked_eps(eps):
    if not isinstance(eps, Real):
        raise TypeError("eps must be a number")
    if not 0 < eps <= np.finfo(np.float64).max:
        raise ValueError("eps must be positive and finite")
    return float(eps)


def as_rows(a):
    return a.reshape(-1, a.shape[-1])


def blocks(total):
    return (slice(start, min(start + BLOCK, total)) for start in range(0, total, BLOCK))


def centre(rows):
    shifted = rows.astype(np.float64)
    shifted = shifted - shifted[:, :1]
    return shifted - shifted.mean(axis=1, keepdims=True)


def normalise(rows, eps):
    c = centre(rows)
    std = np.sqrt((c * c).mean(axis=1, keepdims=True) + eps)
    return c / std, std


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    checked(x, gamma, beta)
    eps = checked_eps(eps)
    kept = np.array(x, order="C", copy=True)
    y = np.empty(x.shape, x.dtype)
    rows, out = as_rows(kept), as_rows(y)
    for block in blocks(len(rows)):
        out[block] = normalise(rows[block], eps)[0] * gamma + beta
    return y, (kept, np.array(gamma), eps)


def block_gradients(rows, upstream, gamma, eps):
    """(dx, dgamma, dbeta) of one block of rows, in float64."""
    xhat, std = normalise(rows, eps)
    g = upstream * gamma
    inner = (g * xhat).mean(axis=1, keepdims=True)
    dx = (g - g.mean(axis=1, keepdims=True) - xhat * inner) / std
    return dx, (upstream * xhat).sum(axis=0), upstream.sum(axis=0)


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache
    rows, upstream = as_rows(x), as_rows(checked_dy(dy, x.shape))
    dx = np.empty(x.shape, x.dtype)
    out = as_rows(dx)

    def step(sums, block):
        out[block], dgamma, dbeta = block_gradients(
            rows[block], upstream[block].astype(np.float64), gamma, eps
        )
        return sums[0] + dgamma, sums[1] + dbeta

    zero = np.zeros(x.shape[-1])
    dgamma, dbeta = reduce(step, blocks(len(rows)), (zero, zero))
    return dx, dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def unit_directions(shape):
    for flat in range(math.prod(shape)):
        v = np.zeros(shape)
        v.flat[flat] = 1.0
        yield v


def sign_directions(shape):
    return (np.random.default_rng(seed).choice([-1.0, 1.0], size=shape) for seed in count(1000))


def directions(shape, limit):
    """All unit vectors where there are few enough of them, otherwise random sign vectors."""
    if math.prod(shape) <= limit:
        return unit_directions(shape)
    return islice(sign_directions(shape), 8)


def relative(analytic, numerical):
    a, n = np.array(analytic), np.array(numerical)
    error = float(np.linalg.norm(a - n) / max(np.linalg.norm(a), np.linalg.norm(n), 1e-12))
    return error if math.isfinite(error) else math.inf


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences."""
    checked(x, gamma, beta)
    checked_dy(dy, x.shape)
    h = 1e-5
    at = (x, gamma, beta)

    def moved(which, by):
        return forward(*(a + by if i == which else a.copy() for i, a in enumerate(at)))[0].copy()

    def slope(which, v):
        return float(np.sum(dy * (moved(which, h * v) - moved(which, -h * v)))) / (2 * h)

    def error(which, gradient):
        if gradient.shape != at[which].shape:
            return math.inf
        vs = list(directions(gradient.shape, 40))
        return relative([float(np.sum(gradient * v)) for v in vs], [slope(which, v) for v in vs])

    cache = forward(*(a.copy() for a in at))[1]
    gradients = [np.array(g, dtype=np.float64) for g in backward(dy.copy(), cache)]
    return {name: error(i, gradients[i]) for i, name in enumerate(("dx", "dgamma", "dbeta"))}
