"""A linear layer for a few rows on a CPU: `linear_few_rows.c`, and torch for everything else."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.c_library import load, run_in_threads
from trapline.gold.c_pointer import in_cpu_memory, pointer

SOURCE = Path(__file__).with_name("linear_few_rows.c")
#: One row is a vector, which torch reads weights for as fast as memory gives them; and with many
#: its packing pays. Both were measured; see docs/components/decoder.md.
LEAST, MOST = 2, 32
#: Fewer products than this a thread are done before another thread has started.
_PRODUCTS_A_THREAD = 1 << 20


class _Job(ctypes.Structure):
    """As in the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "y")),
        *((name, ctypes.c_long) for name in ("rows", "inputs", "outputs", "next")),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K) times weight (N, K), transposed, in whatever way is the fastest here."""
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
    """Why there is no compiled product here, or None."""
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
