"""Layer normalisation as a tape of primitive steps, each with its own pull-back."""

import math
import numbers

import numpy as np

WIDE = np.float64


class Tape:
    """Values by name, and the pull-backs that lead from a result to its operands."""

    def __init__(self, **leaves):
        self.values = dict(leaves)
        self.steps = []

    def apply(self, result, operands, function):
        value, pull = function(*(self.values[name] for name in operands))
        self.values[result] = value
        self.steps.append((result, operands, pull))

    def gradients(self, result, seed):
        grads = {name: np.zeros_like(value) for name, value in self.values.items()}
        grads[result] += seed
        for name, operands, pull in reversed(self.steps):
            for operand, part in zip(operands, pull(grads[name]), strict=False):
                grads[operand] += part
        return grads


def centre(x):
    shifted = x - x[..., :1]
    value = shifted - shifted.mean(axis=-1, keepdims=True)
    return value, lambda g: (g - g.mean(axis=-1, keepdims=True),)


def mean_square(c):
    value = np.mean(c * c, axis=-1, keepdims=True)
    return value, lambda g: (2.0 * c * g / c.shape[-1],)


def root_with(eps):
    def root(v):
        value = np.sqrt(v + eps)
        return value, lambda g: (0.5 * g / value,)

    return root


def divide(c, s):
    value = c / s
    return value, lambda g: (g / s, -np.sum(g * value, axis=-1, keepdims=True) / s)


def scale(n, gamma):
    return n * gamma, lambda g: (g * gamma, np.sum(g * n, axis=(0, 1)))


def shift(n, beta):
    return n + beta, lambda g: (g, np.sum(g, axis=(0, 1)))


def record(x, gamma, beta, eps):
    tape = Tape(x=x.astype(WIDE), gamma=gamma.astype(WIDE), beta=beta.astype(WIDE))
    tape.apply("centred", ("x",), centre)
    tape.apply("variance", ("centred",), mean_square)
    tape.apply("deviation", ("variance",), root_with(eps))
    tape.apply("normalised", ("centred", "deviation"), divide)
    tape.apply("scaled", ("normalised", "gamma"), scale)
    tape.apply("y", ("scaled", "beta"), shift)
    return tape


def verify_array(value, name):
    if not isinstance(value, np.ndarray) or value.dtype not in (np.float32, np.float64):
        raise TypeError(name + " must be an array of float32 or float64")


def verify(x, gamma, beta):
    verify_array(x, "x")
    verify_array(gamma, "gamma")
    verify_array(beta, "beta")
    if x.ndim != 3:
        raise ValueError("x must be three-dimensional")
    if x.shape[2] == 0:
        raise ValueError("x has no features")
    if gamma.shape != (x.shape[2],):
        raise ValueError("gamma must have shape (D,)")
    if beta.shape != (x.shape[2],):
        raise ValueError("beta must have shape (D,)")


def verify_dy(dy, shape):
    verify_array(dy, "dy")
    if dy.shape != shape:
        raise ValueError("dy must have the shape of x")


def verify_eps(eps):
    if not isinstance(eps, numbers.Real):
        raise TypeError("eps must be a number")
    if not (eps > 0 and eps <= np.finfo(WIDE).max):
        raise ValueError("eps must be positive and finite")
    return float(eps)


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """(y, cache) for x (B, T, D), gamma and beta (D,)."""
    verify(x, gamma, beta)
    eps = verify_eps(eps)
    y = record(x, gamma, beta, eps).values["y"]
    return y.astype(x.dtype), {"x": x.copy(), "gamma": gamma.copy(), "eps": eps}


def layer_norm_backward(dy, cache):
    """(dx, dgamma, dbeta) for dy (B, T, D) and the cache of the forward pass."""
    x, gamma = cache["x"], cache["gamma"]
    verify_dy(dy, x.shape)
    tape = record(x, gamma, np.zeros_like(gamma), cache["eps"])
    grads = tape.gradients("y", dy.astype(WIDE))
    return tuple(grads[name].astype(x.dtype) for name in ("x", "gamma", "beta"))


def gradient_check(forward, backward, x, gamma, beta, dy):
    """{"dx", "dgamma", "dbeta": relative error} along sixteen Gaussian directions."""
    verify(x, gamma, beta)
    verify_dy(dy, x.shape)
    h = 1e-5
    rng = np.random.default_rng(12345)
    _, cache = forward(x.copy(), gamma.copy(), beta.copy())
    analytic = [np.array(g, dtype=WIDE) for g in backward(dy.copy(), cache)]
    errors = {}
    for slot, (name, value) in enumerate((("dx", x), ("dgamma", gamma), ("dbeta", beta))):
        if analytic[slot].shape != value.shape:
            errors[name] = math.inf
            continue
        a, n = np.zeros(16), np.zeros(16)
        for k in range(16):
            v = rng.standard_normal(value.shape)
            plus, minus = (
                [x.copy(), gamma.copy(), beta.copy()],
                [x.copy(), gamma.copy(), beta.copy()],
            )
            plus[slot] += h * v
            minus[slot] -= h * v
            y_plus = np.array(forward(*plus)[0])
            y_minus = np.array(forward(*minus)[0])
            a[k] = np.sum(analytic[slot] * v)
            n[k] = np.sum(dy * (y_plus - y_minus)) / (2 * h)
        size = max(np.linalg.norm(a), np.linalg.norm(n), 1e-12)
        error = float(np.linalg.norm(a - n) / size)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors
