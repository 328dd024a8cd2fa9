"""Layer normalisation: forward, backward, gradient check; normalised rows are kept."""

import math
import numbers

import numpy as np

_STEP = 3e-5
_DIRECTIONS = 12


def _floats(name, array, ndim):
    array = np.asarray(array)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, not {array.ndim}")
    return array


def _inputs(x, gamma, beta):
    x, gamma, beta = _floats("x", x, 3), _floats("gamma", gamma, 1), _floats("beta", beta, 1)
    if x.shape[2] < 1 or gamma.shape != x.shape[2:] or beta.shape != x.shape[2:]:
        raise ValueError(
            f"shapes do not match: x {x.shape}, gamma {gamma.shape}, beta {beta.shape}"
        )
    return x, gamma, beta


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    x, gamma, beta = _inputs(x, gamma, beta)
    if not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a real number")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError("eps must be positive and finite")
    # The shift by the first feature is exact for constant rows and removes a large common offset.
    unit = x.astype(np.float64)
    unit -= unit[..., :1].copy()
    unit -= unit.mean(axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt(np.einsum("btd,btd->bt", unit, unit) / x.shape[2] + float(eps))
    unit *= rstd[..., None]
    y = (unit * gamma + beta).astype(x.dtype)
    # rstd stays in float64: for float32 rows that is the room of the two (B, T) arrays.
    return y, (unit.astype(x.dtype), rstd, gamma.copy())


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    saved, rstd, gamma = cache
    dy = _floats("dy", dy, 3)
    if dy.shape != saved.shape:
        raise ValueError(f"dy has shape {dy.shape}, x had {saved.shape}")
    unit = saved.astype(np.float64)
    upstream = dy.astype(np.float64)
    dbeta = upstream.sum(axis=1).sum(axis=0)
    dgamma = np.einsum("btd,btd->bd", upstream, unit).sum(axis=0)
    upstream *= gamma
    along = np.einsum("btd,btd->bt", upstream, unit) / saved.shape[2]
    upstream -= upstream.mean(axis=-1, keepdims=True)
    unit *= along[..., None]
    upstream -= unit
    upstream *= rstd[..., None]
    return tuple(g.astype(saved.dtype) for g in (upstream, dgamma, dbeta))


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences."""
    x, gamma, beta = _inputs(x, gamma, beta)
    dy = _floats("dy", dy, 3)
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {dy.shape}, x has {x.shape}")
    point = [x.astype(np.float64), gamma.astype(np.float64), beta.astype(np.float64)]
    weights = dy.astype(np.float64)
    _, cache = forward(*(p.copy() for p in point))
    gradients = backward(weights.copy(), cache)
    rng = np.random.default_rng(20240229)

    def outputs(which, shift):
        moved = [p + shift if i == which else p.copy() for i, p in enumerate(point)]
        return np.asarray(forward(*moved)[0])

    errors = {}
    for which, name in enumerate(("dx", "dgamma", "dbeta")):
        gradient = np.asarray(gradients[which])
        analytic, numeric = np.empty(_DIRECTIONS), np.empty(_DIRECTIONS)
        for i in range(_DIRECTIONS):
            direction = rng.choice([-1.0, 1.0], size=point[which].shape)
            step = _STEP * direction
            near = outputs(which, step) - outputs(which, -step)
            far = outputs(which, 2 * step) - outputs(which, -2 * step)
            numeric[i] = np.sum(weights * (8 * near - far)) / (12 * _STEP)
            analytic[i] = np.sum(gradient * direction)
        norm = np.linalg.norm
        error = norm(analytic - numeric) / max(norm(analytic), norm(numeric), 1e-12)
        errors[name] = float(error) if np.isfinite(error) else math.inf
    return errors
