"""Layer normalisation over the last axis: forward, backward, gradient check.

Rows are worked off in blocks that fit into the processor cache, in float64 whatever the dtype of the arrays.
The cache holds the input alone: the backward pass recomputes the statistics of a block while it is at hand.
"""

import math
import numbers

import numpy as np

BLOCK_ELEMENTS = 1 << 15  # float64 elements of one working array: 256 KiB
DIRECTIONS = 5
STEP = 3e-5  # of the finite differences, relative to the scale of the input
SMALLEST_SPREAD = 1e-3  # below it the usual eps governs the curvature
CHECK_SEED = 20_240_607


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _check_array("x", x, 3)
    features = x.shape[2]
    if features < 1:
        raise ValueError("x must have at least one feature")
    _check_like("gamma", gamma, (features,), x.dtype)
    _check_like("beta", beta, (features,), x.dtype)
    eps = _checked_eps(eps)

    x = np.array(x, order="C")
    x_rows = x.reshape(-1, features)
    wide_gamma = gamma.astype(np.float64)
    wide_beta = beta.astype(np.float64)
    y = np.empty(x.shape, x.dtype)
    y_rows = y.reshape(-1, features)
    for block in _row_blocks(x_rows):
        x_hat, _ = _standardise(x_rows[block], eps)
        x_hat *= wide_gamma
        x_hat += wide_beta
        y_rows[block] = x_hat
    return y, {"x": x, "gamma": np.array(gamma, order="C"), "eps": eps}


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x = cache["x"]
    _check_like("dy", dy, x.shape, x.dtype)
    features = x.shape[2]
    x_rows = x.reshape(-1, features)
    dy_rows = dy.reshape(-1, features)
    wide_gamma = cache["gamma"].astype(np.float64)

    dx = np.empty(x.shape, x.dtype)
    dx_rows = dx.reshape(-1, features)
    dgamma = np.zeros(features)
    dbeta = np.zeros(features)
    for block in _row_blocks(x_rows):
        x_hat, inverse_std = _standardise(x_rows[block], cache["eps"])
        upstream = dy_rows[block].astype(np.float64)
        dbeta += upstream.sum(axis=0)
        dgamma += (upstream * x_hat).sum(axis=0)
        grad = _centred(upstream * wide_gamma)
        x_hat *= (grad * x_hat).mean(axis=1, keepdims=True)
        grad -= x_hat
        grad *= inverse_std
        dx_rows[block] = grad
    return dx, dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Every input is moved along a few random directions, all elements at once: the number of calls depends on
    neither B nor T, and nothing is assumed about which outputs an input reaches.
    """
    inputs = _checked_inputs(x, gamma, beta, dy)
    _, cache = forward(*(array.copy() for array in inputs))
    gradients = [np.array(gradient) for gradient in backward(dy.copy(), cache)]
    rng = np.random.default_rng(CHECK_SEED)
    errors = {}
    for position, name in enumerate(("dx", "dgamma", "dbeta")):
        array = inputs[position]
        if gradients[position].shape != array.shape:
            errors[name] = math.inf
            continue
        step = STEP * _scale(array)
        analytic, numerical = [], []
        for direction in _directions(array, rng):
            move = (array + step * direction) - array  # what is left of the step after rounding
            analytic.append(np.vdot(gradients[position], move / step))
            numerical.append(_derivative(forward, inputs, position, move, dy) / step)
        errors[name] = _relative_error(np.array(analytic), np.array(numerical))
    return errors


def _row_blocks(rows):
    """Slices that cover all rows, each of about BLOCK_ELEMENTS elements."""
    count, features = rows.shape
    size = max(1, BLOCK_ELEMENTS // features)
    return [slice(start, start + size) for start in range(0, count, size)]


def _centred(rows):
    """A new array: rows minus their means. Exactly 0 for a constant row, however large it is."""
    centred = rows - rows[:, :1]
    centred -= centred.mean(axis=1, keepdims=True)
    return centred


def _standardise(rows, eps):
    """((x - mean) / sqrt(var + eps), 1 / sqrt(var + eps)) in float64, the latter of shape (n, 1).

    Rows are scaled by a power of two to below 1 first, so that no square overflows; the scaling is exact.
    """
    peak = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    exponent = np.maximum(np.frexp(peak)[1], 0)
    scale = np.ldexp(1.0, -exponent)
    x_hat = _centred(rows * scale)
    std = np.sqrt(np.square(x_hat).mean(axis=1, keepdims=True))
    inverse = 1.0 / np.hypot(std, math.sqrt(eps) * scale)
    x_hat *= inverse
    return x_hat, inverse * scale


def _directions(array, rng):
    """Random directions that move every element of `array` by between 0.5 and 1.5."""
    for _ in range(DIRECTIONS):
        signs = rng.choice((-1.0, 1.0), size=array.shape)
        yield signs * rng.uniform(0.5, 1.5, size=array.shape)


def _scale(array):
    """How far an input may be moved as a whole: x by its spread within the rows, gamma and beta freely."""
    if array.size == 0:
        return 1.0
    if array.ndim == 1:
        return max(1.0, float(np.abs(array).max()))
    return max(SMALLEST_SPREAD, float(array.std(axis=-1).mean()))


def _derivative(forward, inputs, position, move, dy):
    """Derivative of sum(dy * y) along `move`: two central differences, combined to fourth order."""
    near, far = (_central_difference(forward, inputs, position, reach * move, dy) for reach in (1.0, 2.0))
    return (8.0 * near - far) / 12.0


def _central_difference(forward, inputs, position, move, dy):
    """sum(dy * (y+ - y-)); the difference comes before the sum, which keeps its digits."""
    outputs = []
    for sign in (1.0, -1.0):
        arguments = [array.copy() for array in inputs]
        arguments[position] += sign * move
        outputs.append(np.array(forward(*arguments)[0]))
    return float(np.sum(dy * (outputs[0] - outputs[1])))


def _relative_error(analytic, numerical):
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.linalg.norm(analytic - numerical)
        size = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
        error = float(distance / size)
    return error if math.isfinite(error) else math.inf


def _checked_inputs(x, gamma, beta, dy):
    _check_array("x", x, 3)
    if x.dtype.type is not np.float64:
        raise TypeError("a gradient check needs float64 arrays")
    if x.shape[2] < 1:
        raise ValueError("x must have at least one feature")
    _check_like("gamma", gamma, x.shape[2:], x.dtype)
    _check_like("beta", beta, x.shape[2:], x.dtype)
    _check_like("dy", dy, x.shape, x.dtype)
    return x, gamma, beta


def _check_array(name, array, rank):
    if not isinstance(array, np.ndarray) or array.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"{name} must be a float32 or float64 array")
    if array.ndim != rank:
        raise ValueError(f"{name} must have rank {rank}, not {array.ndim}")


def _check_like(name, array, shape, dtype):
    _check_array(name, array, len(shape))
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, not {array.dtype}")


def _checked_eps(eps):
    if not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a number")
    try:
        value = float(eps)
    except OverflowError:
        raise ValueError("eps must be finite") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError("eps must be positive and finite")
    return value
