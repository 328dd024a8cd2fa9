"""Layer normalisation over the last axis: forward, backward, gradient check.

All positions are rows of one flat (B*T, D) matrix, worked off in blocks of rows. A block is
widened to float64, so float32 results are rounded once, at the end.
"""

import math
import numbers

import numpy as np

BLOCK_ELEMENTS = 65536
DIRECTIONS = 16
STEP = 3e-5


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x, gamma, beta = np.asarray(x), np.asarray(gamma), np.asarray(beta)
    _check_array("x", x, x.dtype)
    if x.ndim != 3 or x.shape[2] < 1:
        raise ValueError(f"x must have shape (B, T, D) with D >= 1, got {x.shape}")
    for name, vector in (("gamma", gamma), ("beta", beta)):
        _check_array(name, vector, x.dtype)
        if vector.shape != x.shape[2:]:
            raise ValueError(f"{name} must have shape {x.shape[2:]}, got {vector.shape}")
    if not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a real number")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, got {eps}")

    batch, positions, features = x.shape
    rows = x.reshape(batch * positions, features)
    y = np.empty(rows.shape, x.dtype)
    normal = np.empty(rows.shape, x.dtype)
    sigma = np.empty(len(rows))
    for block in _blocks(rows):
        hat, sigma[block] = _standardise(rows[block].astype(np.float64), float(eps))
        normal[block] = hat
        y[block] = hat * gamma + beta
    cache = {
        "normal": normal.reshape(x.shape),
        "sigma": sigma.reshape(batch, positions),
        "gamma": gamma.copy(),
    }
    return y.reshape(x.shape), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    normal, sigma, gamma = cache["normal"], cache["sigma"], cache["gamma"]
    dy = np.asarray(dy)
    _check_array("dy", dy, normal.dtype)
    if dy.shape != normal.shape:
        raise ValueError(f"dy must have shape {normal.shape}, got {dy.shape}")

    features = dy.shape[2]
    count = dy.shape[0] * dy.shape[1]
    upstream = dy.reshape(count, features)
    normal = normal.reshape(count, features)
    sigma = sigma.reshape(count, 1)
    wide_gamma = gamma.astype(np.float64)

    dx = np.empty(upstream.shape, dy.dtype)
    dgamma = np.zeros(features)
    dbeta = np.zeros(features)
    for block in _blocks(upstream):
        dy_block = upstream[block].astype(np.float64)
        hat = normal[block].astype(np.float64)
        dbeta += dy_block.sum(axis=0)
        dgamma += (dy_block * hat).sum(axis=0)

        dhat = dy_block * wide_gamma
        along = (dhat * hat).mean(axis=1, keepdims=True)
        dhat -= dhat.mean(axis=1, keepdims=True)
        dhat -= hat * along
        dx[block] = dhat / sigma[block]
    return dx.reshape(dy.shape), dgamma.astype(dy.dtype), dbeta.astype(dy.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Both sides are compared along random directions of signs, so each element weighs the same.
    """
    point = [np.array(x), np.array(gamma), np.array(beta)]
    weights = np.array(dy)
    _, cache = forward(*[part.copy() for part in point])
    gradients = backward(weights.copy(), cache)

    rng = np.random.default_rng(20240611)
    errors = {}
    for slot, name in enumerate(("dx", "dgamma", "dbeta")):
        gradient = np.asarray(gradients[slot])
        if gradient.shape != point[slot].shape or not np.isfinite(gradient).all():
            errors[name] = math.inf
            continue
        analytic, numerical = np.empty(DIRECTIONS), np.empty(DIRECTIONS)
        for index in range(DIRECTIONS):
            direction = rng.choice([-1.0, 1.0], size=point[slot].shape)
            analytic[index] = np.sum(gradient * direction)
            numerical[index] = _slope(forward, point, slot, direction, weights)
        scale = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
        errors[name] = float(np.linalg.norm(analytic - numerical) / scale)
    return errors


def _slope(forward, point, slot, direction, weights):
    """Fourth-order central difference of sum(weights * y) along a direction of one input."""

    def output(distance):
        moved = [part.copy() for part in point]
        moved[slot] += distance * direction
        return forward(*moved)[0]

    near = output(STEP) - output(-STEP)
    far = output(2 * STEP) - output(-2 * STEP)
    return np.sum(weights * (8 * near - far)) / (12 * STEP)


def _standardise(block, eps):
    """Rows with mean 0 and variance about 1, and the sqrt(var + eps) they were divided by.

    Subtracting the first element keeps the digits of rows far from zero, and makes a
    constant row exactly zero. Dividing by the largest element keeps squares in range.
    """
    centred = block - block[:, :1]
    centred -= centred.mean(axis=1, keepdims=True)
    largest = np.abs(centred).max(axis=1)
    largest[largest == 0] = 1.0
    spread = np.sqrt(np.square(centred / largest[:, None]).mean(axis=1))
    sigma = np.hypot(largest * spread, math.sqrt(eps))
    return centred / sigma[:, None], sigma


def _blocks(rows):
    """Slices that cover the rows of a matrix in pieces of bounded size."""
    height = max(1, BLOCK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), height):
        yield slice(start, start + height)


def _check_array(name, array, dtype):
    if array.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, got {array.dtype}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {array.dtype}")
