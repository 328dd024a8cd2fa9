"""Layer normalisation over the last axis: forward, backward, gradient check.

The cache is a snapshot of the arguments; the backward pass replays the normalisation from it, a block
of rows at a time and in float64. So nothing is rounded to the dtype of the arrays before the very end.
"""

import math
import numbers

import numpy as np

BLOCK_ELEMENTS = 1 << 15  # elements of a block of rows: its temporaries stay in the cache of the CPU
DIRECTIONS = 8  # random directions per input of the gradient check
STEP = 2.0**-10  # step of its differences for rows with a standard deviation of 1


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x, gamma, beta = _checked_inputs(x, gamma, beta)
    eps = _checked_eps(eps)
    features = x.shape[2]
    rows = x.reshape(-1, features)
    y = np.empty(rows.shape, x.dtype)
    for block in _blocks(rows):
        unit, _ = _normalised(rows[block], eps)
        y[block] = gamma * unit + beta
    cache = (np.array(x, order="C"), np.array(gamma), eps)
    return y.reshape(x.shape), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache
    dy = _checked_gradient(dy, x)
    features = x.shape[2]
    rows = x.reshape(-1, features)
    gradients = dy.reshape(-1, features)
    average = _average_weights(features)
    dx = np.empty(rows.shape, x.dtype)
    dgamma = np.zeros(features)
    dbeta = np.zeros(features)
    for block in _blocks(rows):
        upstream = gradients[block].astype(np.float64)
        unit, scale = _normalised(rows[block], eps)
        dgamma += (upstream * unit).sum(axis=0)
        dbeta += upstream.sum(axis=0)
        inner = _centred(upstream * gamma)
        along_unit = (inner * unit) @ average
        dx[block] = (inner - unit * along_unit[:, None]) / scale
    return dx.reshape(x.shape), dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences."""
    inputs = _checked_inputs(x, gamma, beta)
    dy = _checked_gradient(dy, inputs[0]).astype(np.float64)
    point = [array.astype(np.float64) for array in inputs]
    _, cache = forward(*_copies(point))
    gradients = backward(dy.copy(), cache)
    step = _step(point[0])
    rng = np.random.default_rng(20)
    errors = {}
    for index, name in enumerate(("dx", "dgamma", "dbeta")):
        analytic = np.empty(DIRECTIONS)
        numerical = np.empty(DIRECTIONS)
        for k in range(DIRECTIONS):
            direction = _random_direction(rng, point[index].shape)
            analytic[k] = _slope(gradients[index], direction)
            numerical[k] = _central_difference(forward, point, index, step * direction, dy) / step
        errors[name] = _relative_error(analytic, numerical)
    return errors


def _normalised(rows, eps):
    """(unit, scale): the rows without their mean, divided by scale = sqrt(var + eps), in float64."""
    centred = _centred(rows.astype(np.float64))
    largest = np.abs(centred).max(axis=1, keepdims=True)
    largest[largest == 0] = 1
    deviation = largest * np.sqrt(np.mean((centred / largest) ** 2, axis=1, keepdims=True))
    scale = np.hypot(deviation, math.sqrt(eps))
    return centred / scale, scale


def _centred(rows):
    """float64 rows without their means; exactly zero where a row is constant."""
    average = _average_weights(rows.shape[1])
    mean = rows @ average
    mean = np.clip(mean, rows.min(axis=1), rows.max(axis=1))
    centred = rows - mean[:, None]
    return centred - (centred @ average)[:, None]


def _average_weights(features):
    """The vector whose product with a row is the row's mean."""
    return np.full(features, 1 / features)


def _blocks(rows):
    """Slices that together cover all rows."""
    count, features = rows.shape
    height = max(1, BLOCK_ELEMENTS // features)
    return [slice(start, start + height) for start in range(0, count, height)]


def _copies(arrays):
    """Fresh arrays: a callable under test may write to what it gets, or keep it."""
    return [array.copy() for array in arrays]


def _random_direction(rng, shape):
    """A direction that moves every element, by between a half and one and a half."""
    return rng.uniform(0.5, 1.5, shape) * rng.choice((-1.0, 1.0), shape)


def _slope(gradient, direction):
    """Derivative along the direction by a gradient that may be wrong; infinite if it does not even fit."""
    gradient = np.asarray(gradient, dtype=np.float64)
    if gradient.shape != direction.shape:
        return math.inf
    return np.sum(gradient * direction)


def _step(x):
    """A step that is small beside the standard deviation of every row, or beside the usual sqrt(eps)."""
    narrowest = x.std(axis=2).min(initial=1)
    return STEP * max(narrowest, 2.0**-5)


def _central_difference(forward, point, index, move, dy):
    """Derivative of sum(dy * y) as multiples of the move are added to input number `index`, by four points."""

    def output(multiple):
        moved = _copies(point)
        moved[index] += multiple * move
        y = np.array(forward(*moved)[0], dtype=np.float64)
        if y.shape != dy.shape:
            raise ValueError(f"forward returns y of shape {y.shape} for x of shape {dy.shape}")
        return y

    near = output(1) - output(-1)
    far = output(2) - output(-2)
    return np.sum(dy * (8 * near - far)) / 12


def _relative_error(analytic, numerical):
    """|a - n| / max(|a|, |n|, 1e-12) in the 2-norm; infinite if anything is not finite."""
    if not (np.isfinite(analytic).all() and np.isfinite(numerical).all()):
        return math.inf
    size = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
    return float(np.linalg.norm(analytic - numerical) / size)


def _checked_inputs(x, gamma, beta):
    """x, gamma and beta as arrays that fit together."""
    x = _float_array("x", x)
    if x.ndim != 3 or x.shape[2] == 0:
        raise ValueError(f"x must be (B, T, D) with D >= 1, not {x.shape}")
    return (x, *(_fitting(name, a, x.shape[2:], x.dtype) for name, a in (("gamma", gamma), ("beta", beta))))


def _checked_gradient(dy, x):
    """dy as an array like x."""
    return _fitting("dy", dy, x.shape, x.dtype)


def _fitting(name, array, shape, dtype):
    array = _float_array(name, array)
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} as x is, not {array.dtype}")
    return array


def _float_array(name, array):
    array = np.asarray(array)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    return array


def _checked_eps(eps):
    """eps as a float."""
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"eps must be a number, not {type(eps).__name__}")
    try:
        eps = float(eps)
    except OverflowError as error:
        raise ValueError("eps must be finite") from error
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, not {eps}")
    return eps
