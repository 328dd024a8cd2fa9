"""Layer norm and RMS norm in float64 NumPy: the answers every fast path is compared with.

Rows lie along the last axis, D features each; leading axes are free. Backward follows the forward
graph node by node instead of using the closed formula: every line is one use of the chain rule.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


class LayerNormGrads(NamedTuple):
    dx: F64  # (..., D)
    dgamma: F64  # (D,)
    dbeta: F64  # (D,)


class RMSNormGrads(NamedTuple):
    dx: F64  # (..., D); the residual's gradient is the same
    dgamma: F64  # (D,)


def layer_norm(x: ArrayLike, gamma: ArrayLike, beta: ArrayLike, eps: float = 1e-5) -> F64:
    """Each row of x with mean 0 and variance 1 (biased), then scaled and shifted."""
    x, gamma, beta = _wide(x, gamma, beta)
    centred = _centre(x)  # (..., D)
    var = np.mean(centred**2, axis=-1, keepdims=True)  # (..., 1)
    return np.asarray(gamma * (centred / np.sqrt(var + eps)) + beta)


def layer_norm_backward(
    dy: ArrayLike, x: ArrayLike, gamma: ArrayLike, eps: float = 1e-5
) -> LayerNormGrads:
    """Gradients of ⟨dy, layer_norm(x, gamma, beta)⟩, one node of the graph at a time."""
    dy, x, gamma = _wide(dy, x, gamma)
    width = x.shape[-1]
    centred = _centre(x)
    var = np.mean(centred**2, axis=-1, keepdims=True)
    rstd = (var + eps) ** -0.5
    x_hat = centred * rstd

    # y = gamma · x_hat + beta
    dgamma, dbeta = _sum_rows(dy * x_hat), _sum_rows(dy)
    dx_hat = dy * gamma
    # x_hat = centred · rstd
    drstd = np.sum(dx_hat * centred, axis=-1, keepdims=True)
    dcentred = dx_hat * rstd
    # rstd = (var + eps)^(−1/2)
    dvar = drstd * -0.5 * (var + eps) ** -1.5
    # var = Σ centred² / D
    dcentred = dcentred + dvar * 2.0 * centred / width
    # centred = x − Σ x / D
    dx = dcentred - np.sum(dcentred, axis=-1, keepdims=True) / width
    return LayerNormGrads(dx, dgamma, dbeta)


def rms_norm(x: ArrayLike, gamma: ArrayLike, eps: float = 1e-6) -> F64:
    """Each row of x divided by its root mean square, then scaled."""
    x, gamma = _wide(x, gamma)
    mean_square = np.mean(x**2, axis=-1, keepdims=True)  # (..., 1)
    return np.asarray(gamma * (x / np.sqrt(mean_square + eps)))


def rms_norm_backward(
    dy: ArrayLike, x: ArrayLike, gamma: ArrayLike, eps: float = 1e-6
) -> RMSNormGrads:
    """Gradients of ⟨dy, rms_norm(x, gamma)⟩, one node of the graph at a time."""
    dy, x, gamma = _wide(dy, x, gamma)
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    rstd = (mean_square + eps) ** -0.5

    # y = gamma · x · rstd
    dgamma = _sum_rows(dy * x * rstd)
    dx = dy * gamma * rstd
    drstd = np.sum(dy * gamma * x, axis=-1, keepdims=True)
    # rstd = (mean_square + eps)^(−1/2)
    dmean_square = drstd * -0.5 * (mean_square + eps) ** -1.5
    # mean_square = Σ x² / D
    dx = dx + dmean_square * 2.0 * x / x.shape[-1]
    return RMSNormGrads(dx, dgamma)


def _wide(*arrays: ArrayLike) -> tuple[F64, ...]:
    return tuple(np.asarray(array, dtype=np.float64) for array in arrays)


def _centre(x: F64) -> F64:
    """x minus its row means. The second pass removes what rounding a large mean left behind."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    return np.asarray(centred - np.mean(centred, axis=-1, keepdims=True))


def _sum_rows(values: F64) -> F64:
    return np.asarray(np.sum(values.reshape(-1, values.shape[-1]), axis=0))
