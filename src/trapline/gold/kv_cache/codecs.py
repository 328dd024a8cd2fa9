"""Codecs for rows of keys and values: unchanged, or 8 or 4 bit codes with a scale.

A row is encoded once, when it arrives, so later tokens cannot change its error. The layout is that
of the paged kernels: one float16 scale per position and head, value = code · scale, and a byte of
4 bit codes holds elements d and d + ⌈D/2⌉. `torch_backend.py` has the same codecs for tensors.
"""

from functools import cache
from typing import Any, Protocol

import numpy as np

from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import RangeError

#: An encoded row: arrays whose first axis is the position.
Fields = tuple[Any, ...]

#: Candidate scales, as fractions of the one that represents the largest element.
FITTED_SHARES = tuple(1 - 0.025 * i for i in range(1, 13))
FP8_LARGEST = 448.0


class Codec(Protocol):
    """Encodes rows (n,G,D) and decodes them."""

    def encode(self, rows: Any) -> Fields: ...

    def decode(self, fields: Fields, dtype: Any) -> Any: ...


class PairCodec(Protocol):
    """Encodes new keys and values (n,G,D) of a layer, the first at position `start`."""

    def encode(self, layer: int, start: int, k: Any, v: Any) -> Fields: ...

    def decode(self, layer: int, fields: Fields, dtype: Any) -> tuple[Any, Any]: ...


class Alike:
    """Applies one codec to keys and values of every layer."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(self, layer: int, start: int, k: Any, v: Any) -> Fields:
        del layer, start
        return (*self._codec.encode(k), *self._codec.encode(v))

    def decode(self, layer: int, fields: Fields, dtype: Any) -> tuple[Any, Any]:
        del layer
        half = len(fields) // 2
        return self._codec.decode(fields[:half], dtype), self._codec.decode(fields[half:], dtype)


class PlainCodec:
    """Stores rows unchanged."""

    def encode(self, rows: np.ndarray) -> Fields:
        return (rows,)

    def decode(self, fields: Fields, dtype: np.dtype[np.floating]) -> np.ndarray:
        return np.asarray(fields[0].astype(dtype))


class IntCodec:
    """Symmetric integers: −127 … 127 or −7 … 7 times the scale of their position and head.

    The scale represents the largest element exactly; with `fitted` it is the candidate of least
    squared error, which may clip a few elements.
    """

    def __init__(self, bits: int, width: int, *, fitted: bool = False) -> None:
        self.bits, self.width, self.fitted = bits, width, fitted
        self.top = 2 ** (bits - 1) - 1

    def encode(self, rows: np.ndarray) -> Fields:
        """Codes (n,G,D), or (n,G,⌈D/2⌉) for 4 bits, and scales (n,G,1)."""
        largest = np.abs(rows).max(axis=-1, keepdims=True)
        scales = scales_above(largest / self.top, self.top)
        codes = self._codes(rows, scales)
        if self.fitted:
            codes, scales = self._fit(rows, largest, codes, scales)
        return (pack_nibbles(codes) if self.bits == 4 else codes), scales

    def decode(self, fields: Fields, dtype: np.dtype[np.floating]) -> np.ndarray:
        codes, scales = fields
        if self.bits == 4:
            codes = unpack_nibbles(codes, self.width)
        return np.asarray(codes.astype(dtype) * scales.astype(dtype))

    def _codes(self, rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
        divisors = np.where(scales == 0, 1, scales).astype(rows.dtype)
        return np.asarray(np.clip(np.rint(rows / divisors), -self.top, self.top), dtype=np.int8)

    def _fit(
        self, rows: np.ndarray, largest: np.ndarray, codes: np.ndarray, scales: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        error = _squared_error(rows, codes, scales)
        for share in FITTED_SHARES:
            tried = scales_above(largest / self.top * share, self.top)
            candidate = self._codes(rows, tried)
            smaller = _squared_error(rows, candidate, tried)
            better = smaller < error
            codes, scales = np.where(better, candidate, codes), np.where(better, tried, scales)
            error = np.minimum(error, smaller)
        return codes, scales


class Fp8Codec:
    """8 bit floats (E4M3: 4 bits of exponent, 3 of mantissa) times the scale of their row.

    The grid is finer near zero, which suits rows with a few large elements.
    """

    def encode(self, rows: np.ndarray) -> Fields:
        scales = scales_above(np.abs(rows).max(axis=-1, keepdims=True) / FP8_LARGEST, FP8_LARGEST)
        divisors = np.where(scales == 0, 1, scales).astype(rows.dtype)
        return to_fp8(rows / divisors), scales

    def decode(self, fields: Fields, dtype: np.dtype[np.floating]) -> np.ndarray:
        codes, scales = fields
        sign = np.where(codes >= 128, -1, 1).astype(dtype)
        return np.asarray(sign * fp8_grid()[codes & 127].astype(dtype) * scales.astype(dtype))


class RotatedCodec:
    """Rotates rows by a Hadamard matrix before encoding and back after decoding.

    This spreads a few large channels over the whole row, so that one scale fits it. The matrix is
    symmetric and its own inverse; D must be a power of two.
    """

    def __init__(self, inner: Codec, width: int) -> None:
        self._inner = inner
        self._matrix = hadamard(width)

    def encode(self, rows: Any) -> Fields:
        return self._inner.encode(self._rotated(rows))

    def decode(self, fields: Fields, dtype: Any) -> Any:
        return self._rotated(self._inner.decode(fields, dtype))

    def _rotated(self, rows: Any) -> Any:
        if isinstance(rows, np.ndarray):
            return rows @ self._matrix.astype(rows.dtype)
        return rows @ rows.new_tensor(self._matrix)


def hadamard(width: int) -> np.ndarray:
    """The orthonormal Sylvester-Hadamard matrix."""
    if width & (width - 1):
        raise RangeError(
            f"a Hadamard rotation needs a head width that is a power of 2, not {width}"
        )
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(width))


def scales_above(exact: np.ndarray, top: float) -> np.ndarray:
    """Scales rounded up to float16, so that the largest code never clips."""
    if not np.all(exact <= np.finfo(np.float16).max):
        limit = top * float(np.finfo(np.float16).max)
        raise RangeError(f"values must be finite and at most {limit:.3g} to be quantised")
    scales = exact.astype(np.float16)
    above = np.nextafter(scales, np.float16(np.inf))
    return np.asarray(np.where(scales < exact, above, scales))


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes −8 … 7 (…,D) as bytes (…,⌈D/2⌉); an odd D leaves the last high half zero."""
    width = codes.shape[-1]
    half = cdiv(width, 2)
    low = codes[..., :half].view(np.uint8) & 15
    high = np.zeros_like(low)
    high[..., : width - half] = codes[..., half:].view(np.uint8) & 15
    return np.asarray(low | (high << 4))


def unpack_nibbles(packed: np.ndarray, width: int) -> np.ndarray:
    """The inverse: (…,⌈D/2⌉) to int8 (…,D). Nibbles of 8 or more are negative codes."""
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1)[..., :width]
    return (nibbles ^ 8).astype(np.int8) - np.int8(8)


@cache
def fp8_grid() -> np.ndarray:
    """The values of codes 0 … 126: subnormals m/8 · 2⁻⁶, then (1 + m/8) · 2^(e − 7)."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def to_fp8(values: np.ndarray) -> np.ndarray:
    """E4M3 codes of values up to ±448, rounded to nearest, ties to even."""
    size = np.minimum(np.abs(values), FP8_LARGEST)
    grid = fp8_grid()
    between = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(between, size, side="left")
    above = np.searchsorted(between, size, side="right")
    codes = np.where(below % 2 == 0, below, above)
    return np.asarray(codes | (np.signbit(values) << 7), dtype=np.uint8)


def _squared_error(rows: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    back = codes.astype(rows.dtype) * scales.astype(rows.dtype)
    return np.asarray(((back - rows) ** 2).sum(axis=-1, keepdims=True))
