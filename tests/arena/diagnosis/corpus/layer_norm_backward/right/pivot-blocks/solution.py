"""Layer normalisation over the last axis: forward, backward, gradient check.

The (B, T, D) arrays are seen as B * T rows of D features and worked off in blocks of rows that
fit into the processor's cache.  Inside a block everything is float64, whatever the dtype of the
arrays: float32 serves only for storage.
"""

import math
import numbers

import numpy as np

BLOCK_ELEMENTS = 1 << 15        # float64 elements of one block of rows: 256 KiB
EXPONENT_LIMIT = 1000           # 2.0 ** +-1000 and its reciprocal are normal float64 numbers
DIRECTIONS = 8                  # random directions for each input of the gradient check
STEP = 3e-5                     # step of the central differences in x, relative to its spread
LINEAR_STEP = 1e-2              # the same for gamma and beta, in which y is linear


# ----------------------------------------------------------------------------------- validation

def _require_array(name, array, shape=None, dtype=None):
    """Raise unless `array` is a real float array (with the shape and the dtype, where given)."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, not {array.dtype}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")


def _require_inputs(x, gamma, beta):
    _require_array("x", x)
    if x.ndim != 3 or x.shape[2] == 0:
        raise ValueError(f"x must have shape (B, T, D) with D >= 1, not {x.shape}")
    features = x.shape[2:]
    _require_array("gamma", gamma, features, x.dtype)
    _require_array("beta", beta, features, x.dtype)


def _positive_float(eps):
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"eps must be a real number, not {type(eps).__name__}")
    try:
        value = float(eps)
    except OverflowError:
        raise ValueError("eps is too large for a float") from None
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"eps must be positive and finite, not {eps}")
    return value


def _require_cache(cache):
    if not isinstance(cache, (tuple, list)) or len(cache) != 3:
        raise TypeError("cache must be what layer_norm_forward returned")
    xhat, std, gamma = cache
    _require_array("cached xhat", xhat)
    if xhat.ndim != 3:
        raise ValueError("cached xhat must have rank 3")
    _require_array("cached std", std, xhat.shape[:2])
    _require_array("cached gamma", gamma, xhat.shape[2:], xhat.dtype)
    return xhat, std, gamma


# --------------------------------------------------------------------------------- row machinery

def _as_rows(array):
    """(B, T, D) as (B * T, D); a view where the strides allow it."""
    batch, positions, features = array.shape
    return array.reshape(batch * positions, features)


def _blocks(rows):
    """Slices that cut the rows of a (N, D) array into blocks."""
    count, features = rows.shape
    height = max(1, BLOCK_ELEMENTS // features)
    for start in range(0, count, height):
        yield slice(start, min(start + height, count))


def _centre(rows):
    """Subtract from every row its mean, in place.

    The first element of the row goes first, as a pivot: differences of close numbers are exact, so
    a constant row becomes exactly zero and a large common offset costs no digits of the mean.
    """
    rows -= rows[:, :1].copy()
    rows -= rows.mean(axis=1, keepdims=True)


def _standardise(rows, eps):
    """Turn float64 rows into (row - mean) / sqrt(var + eps) in place; return the roots, (N, 1).

    Each row is first divided by a power of two near its largest element, which is exact and
    keeps the squares from overflowing or vanishing.
    """
    _, exponent = np.frexp(np.abs(rows).max(axis=1, keepdims=True))
    unit = np.ldexp(1.0, np.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT))
    rows /= unit
    _centre(rows)
    spread = np.sqrt(np.einsum("nd,nd->n", rows, rows)[:, None] / rows.shape[1])
    root_eps = math.sqrt(eps)
    with np.errstate(over="ignore"):            # an eps that dwarfs the row gives zeros
        divisor = np.hypot(spread, root_eps / unit)
    # The divisor vanishes only for constant rows, which are zero by now.
    rows /= np.maximum(divisor, np.finfo(np.float64).tiny)
    return np.hypot(spread * unit, root_eps)


# ---------------------------------------------------------------------------------- entry points

def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,).

    The cache is (xhat, std, gamma): the normalised rows and gamma in the dtype of x, and
    sqrt(var + eps) of every row in float64, which takes no more than two float32 arrays.
    """
    _require_inputs(x, gamma, beta)
    eps = _positive_float(eps)
    y = np.empty(x.shape, x.dtype)
    xhat = np.empty(x.shape, x.dtype)
    std = np.empty(x.shape[:2], np.float64)
    x_rows, y_rows, xhat_rows = _as_rows(x), _as_rows(y), _as_rows(xhat)
    std_rows = std.reshape(-1, 1)
    scale, shift = gamma.astype(np.float64), beta.astype(np.float64)
    for block in _blocks(x_rows):
        work = x_rows[block].astype(np.float64)
        std_rows[block] = _standardise(work, eps)
        xhat_rows[block] = work
        work *= scale
        work += shift
        y_rows[block] = work
    return y, (xhat, std, gamma.copy())


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    xhat, std, gamma = _require_cache(cache)
    _require_array("dy", dy, xhat.shape, xhat.dtype)
    features = xhat.shape[2]
    dx = np.empty(xhat.shape, xhat.dtype)
    dgamma, dbeta = np.zeros(features), np.zeros(features)
    dy_rows, xhat_rows, dx_rows = _as_rows(dy), _as_rows(xhat), _as_rows(dx)
    std_rows = std.reshape(-1, 1)
    scale = gamma.astype(np.float64)
    for block in _blocks(dy_rows):
        work = dy_rows[block].astype(np.float64)
        unit_rows = xhat_rows[block].astype(np.float64)
        dbeta += work.sum(axis=0)
        dgamma += np.einsum("nd,nd->d", work, unit_rows)
        work *= scale
        _centre(work)
        projection = np.einsum("nd,nd->n", work, unit_rows)[:, None] / features
        unit_rows *= projection
        work -= unit_rows
        work /= std_rows[block]
        dx_rows[block] = work
    return dx, dgamma.astype(xhat.dtype), dbeta.astype(xhat.dtype)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    Every input is moved as a whole along a few random directions, with the differences of fourth
    order over the steps 1 and 2: 4 * DIRECTIONS calls of `forward` for each of the inputs.
    """
    _require_inputs(x, gamma, beta)
    _require_array("x", x, dtype=np.float64)
    _require_array("dy", dy, x.shape, x.dtype)
    point = {"x": x, "gamma": gamma, "beta": beta}

    def output(**moved):
        arrays = {name: moved.get(name, value).copy() for name, value in point.items()}
        y, cache = forward(arrays["x"], arrays["gamma"], arrays["beta"])
        if np.shape(y) != dy.shape:
            raise ValueError(f"forward returned shape {np.shape(y)} instead of {dy.shape}")
        return np.array(y), cache               # a copy: forward may reuse its buffer

    _, cache = output()
    analytic = dict(zip(point, backward(dy.copy(), cache)))
    steps = {
        "x": STEP * _spread(x),
        "gamma": LINEAR_STEP * max(1.0, _rms(gamma)),
        "beta": LINEAR_STEP * max(1.0, _rms(beta)),
    }
    rng = np.random.default_rng(20)
    errors = {}
    for name, value in point.items():
        gradient = np.asarray(analytic[name])
        if gradient.shape != value.shape:
            errors["d" + name] = math.inf
            continue
        slopes = np.empty((2, DIRECTIONS))      # analytic and numerical derivatives
        for k in range(DIRECTIONS):
            direction = _direction(rng, value.shape)

            def rise(multiple):
                move = multiple * steps[name] * direction
                above, _ = output(**{name: value + move})
                below, _ = output(**{name: value - move})
                return np.sum(dy * (above - below))

            slopes[0, k] = np.sum(gradient * direction)
            slopes[1, k] = (8.0 * rise(1.0) - rise(2.0)) / (12.0 * steps[name])
        errors["d" + name] = _relative_error(*slopes)
    return errors


def _rms(array):
    return math.sqrt(np.mean(np.square(array))) if array.size else 0.0


def _spread(x):
    """Typical deviation from the row mean, but never so little that a step drowns in rounding."""
    if x.size == 0:
        return 1.0
    return max(_rms(x - x.mean(axis=2, keepdims=True)), 1e-5 * _rms(x)) or 1.0


def _direction(rng, shape):
    """Random signs with magnitudes in [0.5, 1.5): no element stands still."""
    return rng.choice((-1.0, 1.0), size=shape) * rng.uniform(0.5, 1.5, size=shape)


def _relative_error(a, n):
    scale = max(np.linalg.norm(a), np.linalg.norm(n), 1e-12)
    error = float(np.linalg.norm(a - n) / scale)
    return error if math.isfinite(error) else math.inf
