"""Pools and codecs for tensors. Pools are allocated once and written in place.

`index_copy_` keeps the address of a pool, so that a captured CUDA graph stays valid. Codes and
scales equal those of `codecs.py` bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.api import flash_attention
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.codecs import FITTED_SHARES, FP8_LARGEST, Codec, Fields

_HALF_LARGEST = 65504.0


class TensorRows:
    """Rows in tensors of one device."""

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_zeros(shape)

    def put(self, pool: Tensor, slots: np.ndarray, rows: Tensor) -> None:
        places = torch.from_numpy(slots).to(pool.device)
        if pool.is_contiguous():
            pool.view(-1, *pool.shape[2:]).index_copy_(0, places, rows)
        else:
            pool.index_put_(_page_and_offset(pool, places), rows)

    def get(self, pool: Tensor, slots: np.ndarray) -> Tensor:
        places = torch.from_numpy(slots).to(pool.device)
        if pool.is_contiguous():
            return pool.view(-1, *pool.shape[2:]).index_select(0, places)
        return pool[_page_and_offset(pool, places)]


def _page_and_offset(pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    size = pool.shape[1]
    return slots // size, slots % size


class TensorArithmetic:
    """The arithmetic of the calibrated codec for tensors of one device."""

    half, code = torch.float16, torch.uint8

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def hold(self, constant: np.ndarray) -> Tensor:
        return torch.from_numpy(constant).to(self._device)

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in (torch.float32, torch.float64) else torch.float32

    def cast(self, array: Tensor, dtype: torch.dtype) -> Tensor:
        return array.to(dtype)

    def cells(self, values: Tensor, edges: Tensor) -> Tensor:
        return torch.bucketize(values.contiguous(), edges).to(torch.uint8)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

    def chosen(self, where: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(where, a, b)

    def look_up(self, table: Tensor, index: Tensor) -> Tensor:
        return table[index]

    def positions(self, start: int, n: int) -> Tensor:
        end = start + n
        return torch.arange(start, end, dtype=torch.int32, device=self._device)[:, None, None]

    def waves(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        return angles.cos(), angles.sin()


class PlainCodec:
    """Stores rows unchanged."""

    def encode(self, rows: Tensor) -> Fields:
        return (rows,)

    def decode(self, fields: Fields, dtype: torch.dtype) -> Tensor:
        return _tensor(fields[0].to(dtype))


class IntCodec:
    """Symmetric integers with one float16 scale per position and head."""

    def __init__(self, bits: int, width: int, *, fitted: bool, refusing: bool = True) -> None:
        self.bits, self.width, self.fitted, self.refusing = bits, width, fitted, refusing
        self.top = 2 ** (bits - 1) - 1

    def encode(self, rows: Tensor) -> Fields:
        rows = _wide(rows)
        exact = _divided(_largest(rows), self.top)
        scales = _scales_above(exact, self.top, self.refusing)
        codes = self._codes(rows, scales)
        if self.fitted:
            codes, scales = self._fit(rows, exact, codes, scales)
        return (_pack(codes) if self.bits == 4 else codes), scales

    def decode(self, fields: Fields, dtype: torch.dtype) -> Tensor:
        codes, scales = fields
        if self.bits == 4:
            codes = _unpack(codes, self.width)
        return _tensor(codes.to(dtype) * scales.to(dtype))

    def _codes(self, rows: Tensor, scales: Tensor) -> Tensor:
        divisors = torch.where(scales == 0, 1, scales).to(rows.dtype)
        return torch.round(rows / divisors).clamp(-self.top, self.top).to(torch.int8)

    def _fit(
        self, rows: Tensor, exact: Tensor, codes: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        error = _squared_error(rows, codes, scales)
        for share in FITTED_SHARES:
            tried = _scales_above(exact * share, self.top, self.refusing)
            candidate = self._codes(rows, tried)
            smaller = _squared_error(rows, candidate, tried)
            better = smaller < error
            codes, scales = (
                torch.where(better, candidate, codes),
                torch.where(better, tried, scales),
            )
            error = torch.minimum(error, smaller)
        return codes, scales


class Fp8Codec:
    """E4M3 floats, stored as bytes, with one float16 scale per position and head."""

    def __init__(self, *, refusing: bool = True) -> None:
        self.refusing = refusing

    def encode(self, rows: Tensor) -> Fields:
        rows = _wide(rows)
        exact = _divided(_largest(rows), FP8_LARGEST)
        scales = _scales_above(exact, FP8_LARGEST, self.refusing)
        divisors = torch.where(scales == 0, 1, scales).to(rows.dtype)
        # Converted from float32: float64 would be rounded twice and could differ from the oracle.
        codes = (rows / divisors).float().clamp(-FP8_LARGEST, FP8_LARGEST)
        return codes.to(torch.float8_e4m3fn).view(torch.uint8), scales

    def decode(self, fields: Fields, dtype: torch.dtype) -> Tensor:
        codes, scales = fields
        return _tensor(codes.view(torch.float8_e4m3fn).to(dtype) * scales.to(dtype))


def codec(bits: Any, width: int, *, fitted: bool, refusing: bool = True) -> Codec:
    """The codec of these bits; None stores rows unchanged.

    Rows without a finite scale raise RangeError; with `refusing=False` their scale is NaN instead,
    and no values are read back from the device.
    """
    if bits is None:
        return PlainCodec()
    if bits == "fp8":
        return Fp8Codec(refusing=refusing)
    return IntCodec(bits, width, fitted=fitted, refusing=refusing)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """q (n,H,D) of the last n of S positions; k, v (S,G,D)."""
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = flash_attention(*heads_first, causal=True, window=window)
    return _tensor(out[0].transpose(0, 1))


def _wide(rows: Tensor) -> Tensor:
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=-1, keepdim=True)


def _divided(rows: Tensor, number: float) -> Tensor:
    """rows / number, rounded once: a GPU multiplies by the inverse of a Python number instead."""
    return rows / rows.new_full((), number)


def _scales_above(exact: Tensor, top: float, refusing: bool) -> Tensor:
    """Scales rounded up to float16. `refusing` synchronises with the device."""
    fits = exact <= _HALF_LARGEST
    if refusing and not bool(fits.all()):
        raise RangeError(
            f"values must be finite and at most {top * _HALF_LARGEST:.3g} to be quantised"
        )
    scales = exact.to(torch.float16)
    # The next larger non-negative float16 has the next bit pattern.
    above = (scales.view(torch.int16) + 1).view(torch.float16)
    rounded = torch.where(scales.to(exact.dtype) < exact, above, scales)
    return rounded if refusing else rounded.masked_fill(~fits, torch.nan)


def _pack(codes: Tensor) -> Tensor:
    half = cdiv(codes.shape[-1], 2)
    nibbles = codes.view(torch.uint8) & 15
    high = torch.zeros_like(nibbles[..., :half])
    high[..., : codes.shape[-1] - half] = nibbles[..., half:]
    return nibbles[..., :half] | (high << 4)


def _unpack(packed: Tensor, width: int) -> Tensor:
    nibbles = torch.cat([packed & 15, packed >> 4], dim=-1)[..., :width]
    return (nibbles ^ 8).to(torch.int8) - 8


def _squared_error(rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    back = codes.to(rows.dtype) * scales.to(rows.dtype)
    return ((back - rows) ** 2).sum(dim=-1, keepdim=True)


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
