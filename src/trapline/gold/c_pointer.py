"""Addresses of tensors for C code, given out only for tensors that are what the C code expects."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trapline.gold.errors import DTypeError, ShapeError, UnsupportedError

#: Other subclasses, such as fake tensors, may have no memory of their own.
_ORDINARY = (Tensor, nn.Parameter)


def in_cpu_memory(*tensors: Tensor) -> bool:
    """Whether all of these are ordinary tensors whose elements lie in the memory of the CPU."""
    return all(type(one) in _ORDINARY and one.device.type == "cpu" for one in tensors)


def pointer(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The address of the first element of a contiguous CPU tensor of this dtype and shape.

    Anything else raises: C code would read or write memory that is not the tensor's.
    """
    if not in_cpu_memory(tensor):
        kind = f"a {type(tensor).__name__} on {tensor.device}"
        raise UnsupportedError(f"compiled C needs an ordinary tensor in CPU memory, got {kind}")
    if tensor.dtype != dtype:
        raise DTypeError(f"compiled C needs {dtype}, got {tensor.dtype}")
    if tensor.shape != tuple(shape):
        raise ShapeError(f"compiled C needs shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ShapeError(f"compiled C needs a contiguous tensor, got strides {tensor.stride()}")
    return tensor.data_ptr()
