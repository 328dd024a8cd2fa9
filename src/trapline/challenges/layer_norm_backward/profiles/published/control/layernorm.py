"""Layer norm and its gradients as the published prompt asks for them.

It refuses everything that the prompt does not ask for, and so shows that no check does.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Saved:
    """What the backward pass needs; the prompt leaves its form free."""

    unit: np.ndarray
    rstd: np.ndarray
    gamma: np.ndarray


def forward(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float
) -> tuple[np.ndarray, Saved]:
    """y of shape (B, T, D), with the mean taken twice so that a large one costs no digits."""
    if x.ndim != 3 or x.size == 0 or gamma.shape != x.shape[2:] or beta.shape != x.shape[2:]:
        raise ValueError(f"outside the prompt: {x.shape}, {gamma.shape}, {beta.shape}")
    centred = x - x.mean(axis=-1, keepdims=True)
    centred -= centred.mean(axis=-1, keepdims=True)
    # Rows are scaled by their largest value, or √eps if that is larger, so that no square leaves
    # the range of the dtype and a row of equal values keeps its 1 / √eps.
    least = max(float(np.sqrt(eps)), float(np.finfo(x.dtype).tiny))
    largest = np.maximum(np.abs(centred).max(axis=-1, keepdims=True), x.dtype.type(least))
    scaled = centred / largest
    root = np.sqrt((scaled * scaled).mean(axis=-1, keepdims=True) + _over(eps, largest, x.dtype))
    unit = scaled / root
    return gamma * unit + beta, Saved(unit, 1 / largest / root, gamma)


def _over(eps: float, largest: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """eps / largest², without a square that overflows or vanishes."""
    root = dtype.type(np.sqrt(eps)) / largest
    return np.asarray(root * root)


def backward(dy: np.ndarray, saved: Saved) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dx, dgamma and dbeta."""
    g = dy * saved.gamma
    along = (g * saved.unit).mean(axis=-1, keepdims=True)
    dx = saved.rstd * (g - g.mean(axis=-1, keepdims=True) - saved.unit * along)
    dgamma = np.sum(dy * saved.unit, axis=(0, 1), dtype=np.float64).astype(dy.dtype)
    return dx, dgamma, np.sum(dy, axis=(0, 1), dtype=np.float64).astype(dy.dtype)
