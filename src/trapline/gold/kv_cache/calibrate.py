"""Computes the constants of `calibrated_codec.py` from rows of a model on any text.

Scores are q·k, so the error of a key matters in proportion to the queries that see it: keys are
measured as W^½ k with W the mean of q qᵀ. The bases are the eigenvectors of their covariance, and
of the plain covariance of the values; the eigenvalues determine the bits of each direction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.kv_cache.calibrated_codec import (
    MOST_BITS,
    Basis,
    Calibration,
    check_turns,
    distortion,
)

#: Queries are averaged over distances d to their keys below this, with weight 1 / (1 + d).
NEAR = 64
#: Added to every variance, as a fraction of their mean: other texts vary in other directions.
_UNSEEN = 0.01


def calibrate(
    queries: Sequence[np.ndarray],
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    *,
    turns: np.ndarray | None = None,
) -> Calibration:
    """Calibrates with queries (n,H,D), keys and values (n,G,D) of every layer, before rotation.

    `turns` (D/2,) are the rotary frequencies, in radians per position. A key and a value together
    take 8⅛ bits per element, rounded down; the one with more structure gets fewer.
    """
    if not len(queries) == len(keys) == len(values) > 0:
        counts = (len(queries), len(keys), len(values))
        raise ShapeError(f"queries, keys and values are of {counts} layers")
    if len({k.shape[1:] for k in keys}) > 1:
        raise ShapeError("the heads of all layers must be alike")
    for layer, rows in enumerate(zip(queries, keys, values, strict=True)):
        _check(layer, *rows)
    if turns is not None:
        turns = np.asarray(turns, np.float64)
        check_turns(turns, keys[0].shape[2])
    metrics = [_metric(q, k.shape[1], turns) for q, k in zip(queries, keys, strict=True)]
    plain = np.broadcast_to(np.eye(keys[0].shape[2]), metrics[0].shape)
    of_keys = [_directions(k, metric) for k, metric in zip(keys, metrics, strict=True)]
    of_values = [_directions(v, plain) for v in values]
    k_widths, v_widths = _shared(_spectrum(of_keys), _spectrum(of_values))
    return Calibration(_basis(of_keys, k_widths), _basis(of_values, v_widths), turns)


def _check(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    if k.ndim != 3 or k.shape != v.shape:
        raise ShapeError(f"keys of layer {layer} are {k.shape}, values {v.shape}: needs (n, G, D)")
    n, heads, width = k.shape
    if q.ndim != 3 or q.shape[::2] != (n, width) or not heads or q.shape[1] % heads:
        raise ShapeError(f"queries of layer {layer} are {q.shape} for keys {k.shape}")
    if width < 2:
        raise RangeError("heads of one element have no directions to calibrate")
    if n <= width:
        raise RangeError(f"{n} positions are too few to calibrate heads of {width}")
    for name, rows in (("queries", q), ("keys", k), ("values", v)):
        if not np.isfinite(rows).all():
            raise RangeError(f"{name} of layer {layer} are not finite")


def _metric(q: np.ndarray, heads: int, turns: np.ndarray | None) -> np.ndarray:
    """The mean of q qᵀ over the queries of each kv head and their distances to keys, (G,D,D)."""
    n, _, width = q.shape
    grouped = q.astype(np.float64).reshape(n, heads, -1, width).transpose(1, 0, 2, 3)
    flat = grouped.reshape(heads, -1, width)
    moments = flat.swapaxes(1, 2) @ flat / flat.shape[1]
    if turns is None:
        return np.asarray(moments)
    weights = 1 / (1 + np.arange(NEAR))
    turned = [w * _turn(d * turns) @ moments @ _turn(-d * turns) for d, w in enumerate(weights)]
    return np.asarray(sum(turned) / weights.sum())


def _turn(angles: np.ndarray) -> np.ndarray:
    """The matrix (D,D) that rotates columns by these angles."""
    cosine, sine = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cosine, -sine], [sine, cosine]])


class _Directions(NamedTuple):
    """The basis of one layer; variances descend, with sum 1 if rows and metric are white."""

    center: np.ndarray
    into: np.ndarray
    back: np.ndarray
    spectra: np.ndarray


def _basis(layers: Sequence[_Directions], widths: tuple[int, ...]) -> Basis:
    center, into, back, _ = (
        np.stack(parts).astype(np.float16) for parts in zip(*layers, strict=True)
    )
    return Basis(center, into, back, widths)


def _spectrum(layers: Sequence[_Directions]) -> np.ndarray:
    return np.asarray(np.mean([layer.spectra for layer in layers], axis=(0, 1)))


def _shared(keys: np.ndarray, values: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bits of each direction of keys and values, each side in whole bytes."""
    width = len(keys)
    size = 2 * cdiv(width, 2) + width // 64
    most = MOST_BITS * width // 8
    wanted = round(sum(water_filled(np.concatenate((keys, values)), 8 * size)[:width]) / 8)
    of_keys = min(max(wanted, size - most), most)
    return water_filled(keys, 8 * of_keys), water_filled(values, 8 * (size - of_keys))


def _directions(rows: np.ndarray, metric: np.ndarray) -> _Directions:
    """The basis of rows (n,G,D) with errors measured by metric (G,D,D)."""
    rows = rows.astype(np.float64)
    center = rows.mean(0)
    apart = (rows - center).swapaxes(0, 1)
    covariance = apart.swapaxes(1, 2) @ apart / len(rows)
    root, unroot = _power(metric, 0.5), _power(metric, -0.5)
    variances, vectors = _eigen(root @ covariance @ root)
    variances, vectors = variances[:, ::-1], vectors[..., ::-1]
    deviations = np.sqrt(variances)[:, None]
    into = root @ vectors / deviations
    back = (deviations * vectors).swapaxes(1, 2) @ unroot
    white = _trace(metric) * _trace(covariance) / rows.shape[2]
    return _Directions(center, into, back, variances / white)


def _trace(matrices: np.ndarray) -> np.ndarray:
    return np.asarray(np.trace(matrices, axis1=1, axis2=2))[:, None]


def _power(matrices: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = _eigen(matrices)
    return np.asarray(vectors * values[:, None] ** exponent @ vectors.swapaxes(1, 2))


def _eigen(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(matrices)
    mean = values.mean(-1, keepdims=True)
    if not (mean > 0).all():
        raise RangeError(f"rows of head {int(mean.argmin())} do not vary")
    return np.maximum(values, 0) + _UNSEEN * mean, vectors


def water_filled(variances: np.ndarray, bits: int) -> tuple[int, ...]:
    """Assigns bits one by one where each reduces the error most; ties go to the first."""
    gains = np.array([distortion(b) - distortion(b + 1) for b in range(MOST_BITS)] + [0.0])
    widths = np.zeros(len(variances), int)
    for _ in range(bits):
        widths[np.argmax(variances * gains[widths])] += 1
    return tuple(int(w) for w in widths)
