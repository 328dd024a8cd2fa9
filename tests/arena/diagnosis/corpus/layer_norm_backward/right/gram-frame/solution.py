"""Layer normalisation over the last axis: forward, backward, gradient check.

The backward pass never writes the gradient formula out feature by feature. Of every row it forms the frame of
three vectors

    1 (all ones),    z (the centred row),    g = gamma * dy

and its 3 x 3 Gram matrix. The gradient of the row lies in the span of the frame, and its three coefficients
follow from the Gram matrix alone, so that dx = coefficients @ frame / sqrt(var + eps).

All arithmetic is float64. Rows are shifted by their first entry before they are averaged (constant rows become
exact zeros, a common offset costs no digits) and scaled by a power of two (squares neither overflow nor vanish).
"""

import math
from numbers import Real

import numpy as np

BLOCK = 1 << 15                 # elements of x in work at a time
SMALLEST_SPREAD = 2.0 ** -256   # rows that spread less are scaled as if they spread this much
ONES, CENTRED, SLOPES = range(3)

DIRECTIONS = 16
RELATIVE_STEP = 1e-4
STENCIL = ((1, 2 / 3), (-1, -2 / 3), (2, -1 / 12), (-2, 1 / 12))


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x, gamma, beta = _checked_inputs(x, gamma, beta)
    eps = _checked_eps(eps)
    cache = {"x": np.array(x, order="C"), "gamma": gamma.copy(), "eps": eps}
    y = np.empty(x.shape, x.dtype)
    rows, y_rows = _as_rows(cache["x"]), _as_rows(y)
    for block in _blocks(rows.shape):
        centred, inverse, _ = _standardise(rows[block], eps)
        y_rows[block] = centred * inverse * gamma.astype(np.float64) + beta
    return y, cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache["x"], cache["gamma"], cache["eps"]
    dy = _checked_float(dy, "dy")
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise ValueError(f"dy must be {x.dtype} of shape {x.shape}, not {dy.dtype} of shape {dy.shape}")
    width = gamma.size
    dx = np.empty(x.shape, x.dtype)
    dgamma, dbeta = np.zeros(width), np.zeros(width)
    rows, dy_rows, dx_rows = _as_rows(x), _as_rows(dy), _as_rows(dx)
    for block in _blocks(rows.shape):
        upstream = dy_rows[block].astype(np.float64)
        centred, inverse, exponent = _standardise(rows[block], eps)
        frame = np.stack([np.ones_like(upstream), centred, upstream * gamma], axis=1)
        gram = frame @ frame.transpose(0, 2, 1)
        coefficients = _gradient_coefficients(gram, inverse[:, 0], width)
        dx_rows[block] = (coefficients[:, None, :] @ frame)[:, 0] * np.ldexp(inverse, -exponent)
        dgamma += (upstream * (centred * inverse)).sum(axis=0)
        dbeta += upstream.sum(axis=0)
    return dx, dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Derivatives are compared along random directions of entries +1 and -1, in which every element weighs the same.
    """
    point = [array.astype(np.float64) for array in _checked_inputs(x, gamma, beta)]
    dy = _checked_float(dy, "dy").astype(np.float64)
    if dy.shape != point[0].shape:
        raise ValueError(f"dy must have shape {point[0].shape}, not {dy.shape}")
    _, cache = forward(*(array.copy() for array in point))
    gradients = [np.array(gradient) for gradient in backward(dy.copy(), cache)]
    spread = _root_mean_square(point[0] - point[0].mean(axis=-1, keepdims=True))
    scales = (spread or 1.0, max(1.0, _root_mean_square(gamma)), max(1.0, _root_mean_square(beta)))
    rng = np.random.default_rng(20240229)

    def slope(place, direction, step):
        """Derivative of sum(dy * y) as argument number `place` moves along the direction."""
        change = 0.0
        for distance, weight in STENCIL:
            moved = [array.copy() for array in point]
            moved[place] += distance * step * direction
            change = change + weight * forward(*moved)[0]
        return float(np.sum(dy * change)) / step

    errors = {}
    for place, name in enumerate(("dx", "dgamma", "dbeta")):
        analytic, numerical = np.empty(DIRECTIONS), np.empty(DIRECTIONS)
        for trial in range(DIRECTIONS):
            direction = rng.choice((-1.0, 1.0), size=point[place].shape)
            analytic[trial] = np.sum(gradients[place] * direction)
            numerical[trial] = slope(place, direction, RELATIVE_STEP * scales[place])
        errors[name] = _relative_error(analytic, numerical)
    return errors


def _standardise(rows, eps):
    """(z, w, e) of each row, w and e as columns: x - mean is z * 2^e, and (x - mean) / sqrt(var + eps) is z * w."""
    quarter = rows.astype(np.float64) * 0.25
    shifted = quarter - quarter[:, :1]
    spread = np.abs(shifted).max(axis=1, keepdims=True)
    exponent = np.frexp(np.maximum(spread, SMALLEST_SPREAD))[1]
    centred = np.ldexp(shifted, -exponent)
    centred -= centred.mean(axis=1, keepdims=True)
    exponent = exponent + 2
    variance = np.square(centred).mean(axis=1, keepdims=True)
    inverse = 1 / np.sqrt(variance + np.ldexp(eps, -2 * exponent))
    return centred, inverse, exponent


def _gradient_coefficients(gram, inverse, width):
    """What 1, z and g contribute to sqrt(var + eps) times the gradient of each row, as an array (rows, 3)."""
    coefficients = np.empty(gram.shape[:2])
    coefficients[:, ONES] = -gram[:, ONES, SLOPES] / width
    coefficients[:, CENTRED] = -gram[:, CENTRED, SLOPES] / width * inverse ** 2
    coefficients[:, SLOPES] = 1
    return coefficients


def _relative_error(analytic, numerical):
    """|a - n| / max(|a|, |n|, 1e-12) in the 2-norm; infinite where it is not a number."""
    norm = np.linalg.norm
    error = float(norm(analytic - numerical) / max(norm(analytic), norm(numerical), 1e-12))
    return math.inf if math.isnan(error) else error


def _root_mean_square(array):
    return float(np.sqrt(np.mean(np.square(array)))) if np.size(array) else 0.0


def _as_rows(array):
    """The array (B, T, D) as (B * T, D)."""
    return array.reshape(array.shape[0] * array.shape[1], array.shape[2])


def _blocks(shape):
    """Slices that cut the rows of a matrix into blocks of about BLOCK elements."""
    height, width = shape
    step = max(1, BLOCK // width)
    return [slice(start, start + step) for start in range(0, height, step)]


def _checked_float(array, name):
    array = np.asarray(array)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    return array


def _checked_inputs(x, gamma, beta):
    x, gamma, beta = (_checked_float(array, name) for array, name in ((x, "x"), (gamma, "gamma"), (beta, "beta")))
    if x.ndim != 3 or x.shape[2] < 1:
        raise ValueError(f"x must have shape (B, T, D) with D >= 1, not {x.shape}")
    for array, name in ((gamma, "gamma"), (beta, "beta")):
        if array.shape != x.shape[2:] or array.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} of shape {x.shape[2:]}, not {array.dtype} of {array.shape}")
    return x, gamma, beta


def _checked_eps(eps):
    if not isinstance(eps, Real):
        raise TypeError(f"eps must be a number, not {type(eps).__name__}")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, not {eps}")
    return float(eps)
