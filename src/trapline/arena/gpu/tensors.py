"""Torch tensors over memory that somebody else owns. Runs inside the sandbox as well."""

import ctypes
from typing import Any

_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
#: Typestrings of the CUDA array interface; bfloat16 has none and travels as int16.
_TYPESTR = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "bool": "|b1",
}


class _DeviceMemory:
    """An object that torch reads through the CUDA array interface."""

    def __init__(self, pointer: int, shape: list[int], strides: list[int], dtype: str) -> None:
        size = _ITEM_BYTES[dtype]
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "strides": tuple(size * stride for stride in strides),
            "typestr": _TYPESTR[dtype],
            "data": (pointer, False),
            "version": 3,
        }


def tensor(
    torch: Any, pointer: int, shape: list[int], strides: list[int], dtype: str, device: str
) -> Any:
    """A tensor of this memory; `strides` are in elements."""
    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind, device=device)
    if device == "cuda":
        made = torch.as_tensor(_DeviceMemory(pointer, shape, strides, dtype), device="cuda")
        return made.view(kind) if dtype == "bfloat16" else made
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    raw = (ctypes.c_ubyte * ((last + 1) * _ITEM_BYTES[dtype])).from_address(pointer)
    flat = torch.frombuffer(raw, dtype=kind)
    return flat.as_strided(shape, strides)
