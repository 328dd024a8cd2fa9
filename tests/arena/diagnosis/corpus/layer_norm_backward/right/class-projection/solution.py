"""Layer normalisation seen as geometry: a row is spread times a direction; backward projects."""

from dataclasses import dataclass
from math import inf, isfinite, sqrt
from numbers import Real

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Shapes:
    """Checks of arguments."""

    @staticmethod
    def array(label, value, ndim):
        if not isinstance(value, np.ndarray) or value.dtype not in FLOATS:
            raise TypeError(f"{label}: expected a float32 or float64 array")
        if value.ndim != ndim:
            raise ValueError(f"{label}: expected {ndim} dimensions, got {value.ndim}")
        return value

    @classmethod
    def inputs(cls, x, gamma, beta):
        cls.array("x", x, 3)
        depth = x.shape[-1]
        if depth == 0:
            raise ValueError("x: no features")
        for label, vector in (("gamma", gamma), ("beta", beta)):
            if cls.array(label, vector, 1).shape != (depth,):
                raise ValueError(f"{label}: expected shape ({depth},), got {vector.shape}")

    @staticmethod
    def epsilon(eps):
        if not isinstance(eps, Real):
            raise TypeError("eps: expected a number")
        if not 0 < eps < inf or not 0 < eps <= np.finfo(np.float64).max:
            raise ValueError("eps: expected a positive finite number")
        return float(eps)


@dataclass
class Rows:
    """Rows written as mean + spread * shape, where each shape has mean 0 and mean square 1 (or is 0)."""  # noqa: E501

    shape: np.ndarray
    spread: np.ndarray
    eps: float

    @classmethod
    def split(cls, x, eps):
        centred = x.astype(np.float64)
        centred -= centred[..., :1].copy()
        centred -= centred.mean(axis=-1, keepdims=True)
        return cls._scaled(centred, eps)

    @classmethod
    def _scaled(cls, centred, eps):
        largest = np.abs(centred).max(axis=-1, keepdims=True)
        shape = centred / np.where(largest > 0, largest, 1.0)
        length = np.sqrt(np.mean(shape * shape, axis=-1, keepdims=True))
        shape /= np.where(length > 0, length, 1.0)
        return cls(shape, (largest * length)[..., 0], eps)

    @classmethod
    def restore(cls, cache):
        """From the cache, with the rounding of the stored shapes removed from mean and length."""
        shape = cache["shape"].astype(np.float64)
        shape -= shape.mean(axis=-1, keepdims=True)
        exact = cls._scaled(shape, 0.0)
        return cls(exact.shape, cache["spread"].astype(np.float64), float(cache["eps"]))

    @property
    def deviation(self):
        return np.hypot(self.spread, sqrt(self.eps))[..., None]

    @property
    def ratio(self):
        return self.spread[..., None] / self.deviation

    def normalised(self):
        return self.shape * self.ratio

    def pull_back(self, g):
        """Gradient with respect to the row, from the gradient with respect to the normalised row."""  # noqa: E501
        g = g - g.mean(axis=-1, keepdims=True)
        component = np.mean(g * self.shape, axis=-1, keepdims=True)
        g -= component * self.ratio**2 * self.shape
        return g / self.deviation


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    Shapes.inputs(x, gamma, beta)
    rows = Rows.split(x, Shapes.epsilon(eps))
    y = rows.normalised() * gamma.astype(np.float64) + beta
    cache = {
        "shape": rows.shape.astype(x.dtype, order="C"),
        "spread": rows.spread.astype(x.dtype, order="C"),
        "gamma": np.array(gamma, copy=True),
        "eps": rows.eps,
    }
    return y.astype(x.dtype), cache


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    dtype = cache["shape"].dtype
    if Shapes.array("dy", dy, 3).shape != cache["shape"].shape:
        raise ValueError("dy: its shape is not that of x")
    rows = Rows.restore(cache)
    upstream = dy.astype(np.float64)
    dx = rows.pull_back(upstream * cache["gamma"])
    dgamma = np.sum(upstream * rows.normalised(), axis=(0, 1))
    dbeta = np.sum(upstream, axis=(0, 1))
    return dx.astype(dtype), dgamma.astype(dtype), dbeta.astype(dtype)


class Probe:
    """Directional derivatives of sum(dy * y) by central differences of fourth order."""

    STEP = 3e-5
    COUNT = 6

    def __init__(self, forward, inputs, dy):
        self.forward, self.inputs, self.dy = forward, inputs, dy
        self.rng = np.random.default_rng(7)

    def outputs(self, slot, offset):
        moved = [
            value + offset if i == slot else value.copy() for i, value in enumerate(self.inputs)
        ]
        return np.array(self.forward(*moved)[0], dtype=np.float64)

    def slope(self, slot, direction):
        near = self.outputs(slot, self.STEP * direction) - self.outputs(
            slot, -self.STEP * direction
        )
        far = self.outputs(slot, 2 * self.STEP * direction) - self.outputs(
            slot, -2 * self.STEP * direction
        )
        return float(np.sum(self.dy * (8.0 * near - far))) / (12.0 * self.STEP)

    def error(self, slot, gradient):
        target = self.inputs[slot]
        if gradient.shape != target.shape:
            return inf
        pairs = []
        for _ in range(self.COUNT):
            direction = np.where(self.rng.random(target.shape) < 0.5, -1.0, 1.0)
            pairs.append((float(np.sum(gradient * direction)), self.slope(slot, direction)))
        analytic, numerical = np.array(pairs).T
        scale = max(np.linalg.norm(analytic), np.linalg.norm(numerical), 1e-12)
        error = float(np.linalg.norm(analytic - numerical) / scale)
        return error if isfinite(error) else inf


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} of a backward pass against central differences."""
    Shapes.inputs(x, gamma, beta)
    if Shapes.array("dy", dy, 3).shape != x.shape:
        raise ValueError("dy: its shape is not that of x")
    probe = Probe(forward, [x.copy(), gamma.copy(), beta.copy()], dy)
    _, cache = forward(x.copy(), gamma.copy(), beta.copy())
    gradients = [np.array(g, dtype=np.float64) for g in backward(dy.copy(), cache)]
    return {name: probe.error(i, gradients[i]) for i, name in enumerate(("dx", "dgamma", "dbeta"))}
