"""A linear layer for a few rows on a CPU in C (`linear_few_rows.c`); torch for all others."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.c_library import load, run_in_threads
from trapline.gold.c_pointer import in_cpu_memory, pointer

SOURCE = Path(__file__).with_name("linear_few_rows.c")
#: Rows served by C. For one row torch is limited by memory already, and for many its packing pays;
#: docs/lab/decoder.md has the measurements.
LEAST, MOST = 2, 32
#: Work a thread, in multiplications, below which another thread does not pay.
_PRODUCTS_A_THREAD = 1 << 20


class _Job(ctypes.Structure):
    """Mirrors the struct in the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "y")),
        *((name, ctypes.c_long) for name in ("rows", "inputs", "outputs", "next")),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K) · weight (N, K)ᵀ by the fastest available way."""
    if not _suits(x, weight, bias):
        return functional.linear(x, weight, bias)
    library = _library()
    assert not isinstance(library, str), library
    (rows, inputs), outputs = x.shape, len(weight)
    x = x.contiguous()
    y = x.new_empty((rows, outputs))
    work = rows * inputs * outputs // _PRODUCTS_A_THREAD
    job = _Job(
        pointer(x, torch.float32, (rows, inputs)),
        pointer(weight, torch.float32, (outputs, inputs)),
        pointer(y, torch.float32, (rows, outputs)),
        *(rows, inputs, outputs, 0),
    )
    run_in_threads(library.linear_few_rows, job, min(torch.get_num_threads(), work))
    return y


def unavailable() -> str | None:
    """Why the C code is not available, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.dim() == 2
        and LEAST <= len(x) <= MOST
        and x.dtype == weight.dtype == torch.float32
        and in_cpu_memory(x, weight)
        and bias is None
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and unavailable() is None
    )


@cache
def _library() -> ctypes.CDLL | str:
    return load(SOURCE, linear_few_rows=[ctypes.c_void_p])
