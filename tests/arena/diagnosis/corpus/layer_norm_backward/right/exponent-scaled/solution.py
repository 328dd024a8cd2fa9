"""Layer normalisation over the last axis: forward, backward, gradient check.

Every row is split as `x - mean = scaled * 2**exponent` with `scaled` of the order of one, so that squares
neither overflow nor vanish whatever the size of `x`.  With

    sigma = sqrt(mean(scaled**2) + eps * 4**-exponent)

the normalised row is `scaled / sigma`, and 1 / sqrt(var + eps) is `2**-exponent / sigma`.
All arithmetic is in float64, also for float32 arrays.

The cache is the tuple (normalised, sigma, exponent, gamma): arrays of shape (B, T, D), (B, T), (B, T)
and (D,), in the dtype of `x`.
"""

import math

import numpy as np

DIRECTIONS = 8  # random directions per input of the gradient check
STEP = 3e-5  # their step; short against sqrt(eps), the width of the steepest rows
STENCIL = ((1, 8.0), (2, -1.0))  # (multiple of the step, weight): central differences, fourth order
STENCIL_DIVISOR = 12.0


# ---------------------------------------------------------------------------------------------- checks


def _check_array(name, array, shape, dtype=None):
    """`array` is a float32 or float64 array (of `dtype`, if given) of exactly this shape."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} like the other arrays, not {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")


def _check_inputs(x, gamma, beta):
    """`x` is (B, T, D) with D >= 1, `gamma` and `beta` are (D,)."""
    _check_array("x", x, np.shape(x))
    if x.ndim != 3:
        raise ValueError(f"x must have rank 3, not {x.ndim}")
    features = x.shape[-1]
    if features < 1:
        raise ValueError("x must have at least one feature")
    _check_array("gamma", gamma, (features,), x.dtype)
    _check_array("beta", beta, (features,), x.dtype)


def _checked_eps(eps):
    """`eps` as a float, positive and finite."""
    if isinstance(eps, (complex, np.complexfloating)):
        raise TypeError("eps must be real")
    eps = float(eps)
    if not (0.0 < eps < math.inf):
        raise ValueError(f"eps must be positive and finite, not {eps}")
    return eps


# ----------------------------------------------------------------------------------- forward, backward


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _check_inputs(x, gamma, beta)
    eps = _checked_eps(eps)
    with np.errstate(over="ignore", under="ignore"):
        scaled, exponent = _centred_rows(x)
        sigma = np.hypot(
            np.sqrt(np.mean(scaled * scaled, axis=-1)),
            np.ldexp(math.sqrt(eps), -exponent),
        )
        normalised = scaled / sigma[..., None]
        y = gamma * normalised + beta
        cache = (
            normalised.astype(x.dtype),
            sigma.astype(x.dtype),
            exponent.astype(x.dtype),
            gamma.copy(),
        )
        return y.astype(x.dtype), cache


def _centred_rows(x):
    """(scaled, exponent) with `x - mean = scaled * 2**exponent`, |scaled| at most 2.

    The first entry of a row is subtracted before the mean is taken: a constant row becomes exactly zero,
    and a large mean costs no digits of the spread.  Halving first keeps that difference in range.
    """
    half = 0.5 * x.astype(np.float64)
    half -= half[..., :1].copy()
    _, exponent = np.frexp(np.max(np.abs(half), axis=-1))
    scaled = np.ldexp(half, -exponent[..., None])
    scaled -= np.mean(scaled, axis=-1, keepdims=True)
    return scaled, exponent + 1


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass.

    With g = gamma * dy and n the normalised row:
    dx = (g - mean(g) - n * mean(g * n)) / sqrt(var + eps).
    """
    normalised, sigma, exponent, gamma = cache
    _check_array("dy", dy, normalised.shape, normalised.dtype)
    with np.errstate(over="ignore", under="ignore"):
        # Copies of our own in float64; both are overwritten.
        dy_wide = dy.astype(np.float64)
        rows = normalised.astype(np.float64)
        dgamma = np.sum(dy_wide * rows, axis=(0, 1))
        dbeta = np.sum(dy_wide, axis=(0, 1))

        dx = np.multiply(dy_wide, gamma, out=dy_wide)
        rows *= np.mean(dx * rows, axis=-1, keepdims=True)
        dx -= np.mean(dx, axis=-1, keepdims=True)
        dx -= rows
        dx /= sigma[..., None]
        dx = np.ldexp(dx, -exponent[..., None].astype(np.intc))
        return tuple(grad.astype(dy.dtype) for grad in (dx, dgamma, dbeta))


# -------------------------------------------------------------------------------------- gradient check


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Derivatives are compared along random directions of entries +1 and -1: whichever element of a
    gradient is wrong, every direction shows its whole error.
    """
    _check_inputs(x, gamma, beta)
    _check_array("dy", dy, x.shape, x.dtype)
    if x.dtype != np.float64:
        raise TypeError("the gradient check needs float64 arrays")
    inputs = (x, gamma, beta)
    # Callables get copies: nothing is known about what they do to their arguments.
    _, cache = forward(*(array.copy() for array in inputs))
    grads = backward(dy.copy(), cache)
    rng = np.random.default_rng(20240229)
    errors = {}
    for which, (name, grad) in enumerate(zip(("dx", "dgamma", "dbeta"), grads)):
        grad = np.asarray(grad)
        if grad.shape != inputs[which].shape:
            raise ValueError(f"backward returned {name} of shape {grad.shape}")
        analytic, numerical = np.empty(DIRECTIONS), np.empty(DIRECTIONS)
        for i in range(DIRECTIONS):
            direction = rng.choice([-1.0, 1.0], size=grad.shape)
            analytic[i] = np.sum(grad * direction)
            numerical[i] = _slope(forward, inputs, which, direction, dy)
        errors[name] = _relative_error(analytic, numerical)
    return errors


def _slope(forward, inputs, which, direction, dy):
    """Derivative of sum(dy * y) when one of the inputs moves along `direction`."""

    def output(multiple):
        moved = [array.copy() for array in inputs]
        moved[which] += multiple * STEP * direction
        y, _ = forward(*moved)
        return np.array(y)

    # Differences are taken before the sum over all outputs, which would drown them in its rounding.
    slope = 0.0
    for multiple, weight in STENCIL:
        slope += weight * np.sum(dy * (output(multiple) - output(-multiple)))
    return slope / (STENCIL_DIVISOR * STEP)


def _relative_error(a, n):
    """|a - n| / max(|a|, |n|, 1e-12) in the 2-norm; infinite if either is not a number."""
    size_a, size_n = np.linalg.norm(a), np.linalg.norm(n)
    error = np.linalg.norm(a - n) / max(size_a, size_n, 1e-12)
    return float(error) if math.isfinite(error) else math.inf
