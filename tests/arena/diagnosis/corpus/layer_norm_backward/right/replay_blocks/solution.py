"""Layer normalisation over the last axis: forward, backward, gradient check.

The cache keeps a copy of x; the backward pass replays the statistics block by block, in float64.
"""

from dataclasses import dataclass

import numpy as np

BLOCK_ELEMENTS = 1 << 15


@dataclass
class Block:
    """A block of rows, centred and scaled, in float64."""

    unit: np.ndarray  # (rows, D)
    inverse_std: np.ndarray  # (rows, 1)

    @classmethod
    def of(cls, rows, eps):
        rows = rows.astype(np.float64)
        # Rounding may push the mean of equal numbers off them; the clip makes constant rows exact.
        mean = np.clip(rows.mean(axis=1), rows.min(axis=1), rows.max(axis=1))
        rows -= mean[:, None]
        # What the rounding of a large mean left over.
        rows -= rows.mean(axis=1, keepdims=True)
        variance = np.mean(np.square(rows), axis=1, keepdims=True)
        inverse_std = 1.0 / np.sqrt(variance + eps)
        return cls(rows * inverse_std, inverse_std)

    def pull_back(self, upstream):
        """Gradient with respect to the rows, from that with respect to `unit`."""
        mean = upstream.mean(axis=1, keepdims=True)
        slope = np.mean(upstream * self.unit, axis=1, keepdims=True)
        return self.inverse_std * (upstream - mean - self.unit * slope)


def _require_float(**arrays):
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: expected an array")
        if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
            raise TypeError(f"{name}: expected float32 or float64, got {array.dtype}")


def _require_shapes(x, gamma, beta):
    if x.ndim != 3 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape (B, T, D), got {x.shape}")
    for name, array in (("gamma", gamma), ("beta", beta)):
        if array.shape != (x.shape[-1],):
            raise ValueError(f"{name}: expected shape ({x.shape[-1]},), got {array.shape}")


def _spans(rows, features):
    step = max(1, BLOCK_ELEMENTS // features)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    _require_float(x=x, gamma=gamma, beta=beta)
    _require_shapes(x, gamma, beta)
    eps = float(eps)
    if not 0.0 < eps < np.inf:
        raise ValueError("eps: expected a positive finite number")
    features = x.shape[-1]
    kept = np.array(x, order="C")
    rows = kept.reshape(-1, features)
    y = np.empty_like(rows)
    for span in _spans(len(rows), features):
        y[span] = Block.of(rows[span], eps).unit * gamma + beta
    return y.reshape(x.shape), {"x": kept, "gamma": np.array(gamma, order="C"), "eps": eps}


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma, eps = cache["x"], cache["gamma"], float(cache["eps"])
    _require_float(dy=dy)
    if dy.shape != x.shape:
        raise ValueError(f"dy: expected shape {x.shape}, got {dy.shape}")
    features = x.shape[-1]
    rows = x.reshape(-1, features)
    upstream = dy.reshape(-1, features)
    dx = np.empty_like(rows)
    dgamma = np.zeros(features)
    dbeta = np.zeros(features)
    for span in _spans(len(rows), features):
        block = Block.of(rows[span], eps)
        part = upstream[span].astype(np.float64)
        dgamma += np.sum(part * block.unit, axis=0)
        dbeta += np.sum(part, axis=0)
        dx[span] = block.pull_back(part * gamma)
    return dx.reshape(x.shape), dgamma.astype(x.dtype), dbeta.astype(x.dtype)


def _relative_error(analytic, numeric):
    gap = np.linalg.norm(analytic - numeric)
    size = max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)
    error = float(gap / size)
    return error if np.isfinite(error) else float("inf")


def _slope(function, step):
    """Central difference of fourth order at 0."""
    near = function(step) - function(-step)
    far = function(2 * step) - function(-2 * step)
    return (8 * near - far) / (12 * step)


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences.

    x is moved along random directions (64 calls), gamma and beta by element (2 D calls each).
    """
    _require_float(x=x, gamma=gamma, beta=beta, dy=dy)
    _require_shapes(x, gamma, beta)
    if dy.shape != x.shape:
        raise ValueError(f"dy: expected shape {x.shape}, got {dy.shape}")
    base = forward(x.copy(), gamma.copy(), beta.copy())
    origin = base[0].copy()
    dx, dgamma, dbeta = backward(dy.copy(), base[1])

    def gain(x_, gamma_, beta_):
        return float(np.sum(dy * (forward(x_, gamma_, beta_)[0] - origin)))

    rng = np.random.default_rng(7)
    along, measured = [], []
    for _ in range(16):
        direction = rng.uniform(0.5, 1.5, x.shape) * rng.choice((-1.0, 1.0), x.shape)
        along.append(float(np.sum(dx * direction)))
        measured.append(
            _slope(lambda h, d=direction: gain(x + h * d, gamma.copy(), beta.copy()), 3e-5)
        )

    step = 1e-4
    numeric_gamma, numeric_beta = np.empty(gamma.shape), np.empty(beta.shape)
    for j in range(gamma.size):
        nudge = np.zeros(gamma.shape)
        nudge[j] = step
        up, down = (
            gain(x.copy(), gamma + nudge, beta.copy()),
            gain(x.copy(), gamma - nudge, beta.copy()),
        )
        numeric_gamma[j] = (up - down) / (2 * step)
        up, down = (
            gain(x.copy(), gamma.copy(), beta + nudge),
            gain(x.copy(), gamma.copy(), beta - nudge),
        )
        numeric_beta[j] = (up - down) / (2 * step)

    return {
        "dx": _relative_error(np.array(along), np.array(measured)),
        "dgamma": _relative_error(np.asarray(dgamma), numeric_gamma),
        "dbeta": _relative_error(np.asarray(dbeta), numeric_beta),
    }
