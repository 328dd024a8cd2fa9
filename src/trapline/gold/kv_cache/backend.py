"""Selects codec, pools and attention for NumPy arrays or torch tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trapline.gold import checks
from trapline.gold.kv_cache.calibrated_codec import (
    Arithmetic,
    CalibratedPair,
    Calibration,
    NumpyArithmetic,
)
from trapline.gold.kv_cache.codecs import (
    Alike,
    Codec,
    Fp8Codec,
    IntCodec,
    PairCodec,
    PlainCodec,
    RotatedCodec,
)
from trapline.gold.kv_cache.paged import NumpyRows, Rows

Bits = Literal[4, 8, "fp8"]


@dataclass(frozen=True, slots=True)
class Backend:
    """The array-specific parts of a cache, chosen by the first rows it receives."""

    codec: PairCodec
    #: Encodes the error of `codec`; see `recent.py`.
    second: PairCodec
    rows: Rows
    attention: Callable[..., Any]
    dtype: Any


def backend_for(
    rows: Any, bits: Bits | None, width: int, *, rotate: bool, calibration: Calibration | None
) -> Backend:
    math: Arithmetic = NumpyArithmetic()
    if isinstance(rows, np.ndarray):
        codec, second = _codec(bits, width, fitted=rotate), _codec(4, width, fitted=False)
        pool: Rows = NumpyRows()
        attention: Callable[..., Any] = cached_attention
    else:
        from trapline.gold.kv_cache import torch_backend as fast

        codec, second = fast.codec(bits, width, fitted=rotate), fast.codec(4, width, fitted=False)
        pool, attention = fast.TensorRows(), fast.cached_attention
        math = fast.TensorArithmetic(rows.device)
    codec = RotatedCodec(codec, width) if rotate else codec
    pair = Alike(codec) if calibration is None else CalibratedPair(calibration, math)
    return Backend(pair, Alike(second), pool, attention, rows.dtype)


def cached_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, window: int | None = None
) -> np.ndarray:
    """q (n,H,D) of the last n of S positions; k, v (S,G,D); head h reads kv head h // (H/G)."""
    n, heads, width = q.shape
    if n == 0:
        return np.zeros_like(q)
    positions, kv_heads, _ = k.shape
    grouped = q.reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * width**-0.5  # (G, H/G, n, S)
    behind = np.arange(n)[:, None] + (positions - n) - np.arange(positions)
    scores[..., (behind < 0) | (behind >= (window or positions))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights @ v.transpose(1, 0, 2)[:, None] / weights.sum(axis=-1, keepdims=True)
    return np.ascontiguousarray(out.transpose(2, 0, 1, 3).reshape(n, heads, width))


def floats(array: Any) -> tuple[str, ...]:
    """Accepted dtypes: float32 and float64 for arrays, half precision too for tensors."""
    return checks.FLOATS if isinstance(array, np.ndarray) else checks.LOW_FLOATS


def same_dtype(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _codec(bits: Bits | None, width: int, *, fitted: bool) -> Codec:
    if bits is None:
        return PlainCodec()
    return Fp8Codec() if bits == "fp8" else IntCodec(bits, width, fitted=fitted)
