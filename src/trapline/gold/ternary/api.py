"""Public functions of ternary weights: they check arguments and choose an implementation."""

from typing import Any, NamedTuple

import numpy as np

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.impl import Impl, choose
from trapline.gold.ternary import pack as storage
from trapline.gold.ternary import quantize
from trapline.gold.ternary.quantize import GROUP

_OFFERED: tuple[Impl, ...] = ("oracle", "torch")


class Ternary(NamedTuple):
    """Codes and scales: a weight is code · scale of its group."""

    codes: Any  # int8 (..., n), −1, 0 or 1
    scales: Any  # float16 (..., ceil(n / group_size))


def ternarize(
    w: Any, group_size: int = GROUP, method: str = "absmean", *, impl: Impl | None = None
) -> Ternary:
    """Codes and float16 scales of w (..., n), one scale per `group_size` neighbours of a row.

    Methods: `absmean` (threshold at half the mean magnitude), `threshold` (at 0.775 of it),
    `lstsq` (least squared error). All are idempotent on dequantised weights. NaN and ±inf are
    refused, except on a GPU and in compiled code, where looking for them would wait.
    """
    chosen = choose("ternarize", _OFFERED, impl, w=w)
    checks.floating(*checks.FLOATS, w=w)
    checks.axes(w=(w, "... N"))
    checks.integer_between(1, 2**31, group_size=group_size)
    if method not in quantize.METHODS:
        raise RangeError(f"method must be one of {', '.join(quantize.METHODS)}, got {method!r}")
    if chosen == "oracle":
        if not np.isfinite(w).all():
            raise RangeError("w must be finite")
        return Ternary(*quantize.ternarize(w, group_size, method))
    from trapline.gold.ternary import layers as linear

    if linear.has_readable_infinities(w):
        raise RangeError("w must be finite")
    return Ternary(*linear.ternarize(w, group_size, method))


def dequantize(codes: Any, scales: Any, group_size: int = GROUP) -> Any:
    """code · scale as float32, in the shape of `codes`; NumPy arrays or torch tensors."""
    chosen = choose("dequantize", _OFFERED, None, codes=codes, scales=scales)
    checks.integer_between(1, 2**31, group_size=group_size)
    _check_pair(codes, scales, group_size)
    if chosen == "oracle":
        return quantize.dequantize(codes, scales, group_size)
    from trapline.gold.ternary import layers as linear

    return linear.dequantize(codes, scales, group_size)


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes (..., n) as the runtime plane, uint8 (..., ceil(n / 4))."""
    _check_codes(codes)
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise RangeError("codes must be −1, 0 or 1")
    return storage.pack(codes)


def unpack(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The codes of this shape in a runtime plane."""
    checks.arrays(packed=packed)
    if checks.dtype_name(packed) != "uint8":
        raise DTypeError(f"packed must be uint8, got {checks.dtype_name(packed)}")
    if not shape or packed.shape != (*shape[:-1], cdiv(shape[-1], 4)):
        raise ShapeError(f"{packed.shape} bytes do not hold codes of shape {tuple(shape)}")
    return storage.unpack(packed, tuple(shape))


def _check_codes(codes: Any) -> None:
    checks.arrays(codes=codes)
    if checks.dtype_name(codes) != "int8":
        raise DTypeError(f"codes must be int8, got {checks.dtype_name(codes)}")
    checks.axes(codes=(codes, "... N"))


def _check_pair(codes: Any, scales: Any, group_size: int) -> None:
    _check_codes(codes)
    if checks.dtype_name(scales) != "float16":
        raise DTypeError(f"scales must be float16, got {checks.dtype_name(scales)}")
    wanted = (*codes.shape[:-1], cdiv(codes.shape[-1], group_size))
    if tuple(scales.shape) != wanted:
        raise ShapeError(f"scales must have shape {wanted}, got {tuple(scales.shape)}")
