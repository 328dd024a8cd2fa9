"""How rows of keys and values are stored: as they are, or as 8 or 4 bit integers with a scale.

A codec is a pure function of a row: a row is encoded once, when it arrives, and no later token can
change its error. The layout is that of the paged kernels: one float16 scale a position and head,
value = code · scale, and a byte of 4 bit codes holds elements d and d + ⌈D/2⌉.
"""

from typing import Protocol

import numpy as np

from trapline.gold.errors import RangeError

#: What a row is stored as: arrays whose first axis is the position.
Fields = tuple[np.ndarray, ...]


class Codec(Protocol):
    """Rows (n,G,D) to fields and back."""

    def encode(self, rows: np.ndarray) -> Fields: ...

    def decode(self, fields: Fields, dtype: np.dtype[np.floating]) -> np.ndarray: ...


class PlainCodec:
    """Rows as they come."""

    def encode(self, rows: np.ndarray) -> Fields:
        return (rows,)

    def decode(self, fields: Fields, dtype: np.dtype[np.floating]) -> np.ndarray:
        return fields[0].astype(dtype)


class IntCodec:
    """Symmetric integers: −127 … 127 or −7 … 7 times the scale of their position and head."""

    def __init__(self, bits: int, width: int) -> None:
        self.bits, self.width = bits, width
        self.top = 2 ** (bits - 1) - 1

    def encode(self, rows: np.ndarray) -> Fields:
        """Codes (n,G,D), or (n,G,⌈D/2⌉) for 4 bits, and scales (n,G,1)."""
        scales = self._scales(np.abs(rows).max(axis=-1, keepdims=True))
        divisors = np.where(scales == 0, 1, scales).astype(rows.dtype)
        codes = np.clip(np.rint(rows / divisors), -self.top, self.top).astype(np.int8)
        return (pack_nibbles(codes) if self.bits == 4 else codes), scales

    def decode(self, fields: Fields, dtype: np.dtype[np.floating]) -> np.ndarray:
        """code · scale."""
        codes, scales = fields
        if self.bits == 4:
            codes = unpack_nibbles(codes, self.width)
        return np.asarray(codes.astype(dtype) * scales.astype(dtype))

    def _scales(self, largest: np.ndarray) -> np.ndarray:
        """In float16 before any code is computed, and rounded up: the largest code never clips."""
        exact = largest / self.top
        if not np.all(exact <= np.finfo(np.float16).max):
            limit = self.top * float(np.finfo(np.float16).max)
            raise RangeError(f"values must be finite and at most {limit:.3g} to be quantised")
        scales = exact.astype(np.float16)
        above = np.nextafter(scales, np.float16(np.inf))
        return np.asarray(np.where(scales < exact, above, scales))


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes −8 … 7 (…,D) as bytes (…,⌈D/2⌉); the last high half of an odd D is zero."""
    width = codes.shape[-1]
    half = -(-width // 2)
    low = codes[..., :half].view(np.uint8) & 15
    high = np.zeros_like(low)
    high[..., : width - half] = codes[..., half:].view(np.uint8) & 15
    return np.asarray(low | (high << 4))


def unpack_nibbles(packed: np.ndarray, width: int) -> np.ndarray:
    """The inverse: (…,⌈D/2⌉) to int8 (…,D). A nibble of 8 or more stands for a negative code."""
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1)[..., :width]
    return (nibbles ^ 8).astype(np.int8) - np.int8(8)
