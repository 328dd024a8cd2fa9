"""The CPU's packed product: `packed_linear.c`. Without a compiler `fast` takes torch instead."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trapline.gold.c_library import load, run_in_threads

GROUP = 128
SOURCE = Path(__file__).with_name("packed_linear.c")
#: Fewer weights than this a thread are done before another thread has started.
_WEIGHTS_A_THREAD = 1 << 20


class _Job(ctypes.Structure):
    """As in the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "plane", "scales", "y")),
        *((name, ctypes.c_void_p) for name in ("digits", "less", "units", "backs")),
        *((name, ctypes.c_long) for name in ("count", "rows", "columns", "row_bytes", "groups")),
        ("next", ctypes.c_long),
    )


def unavailable() -> str | None:
    """Why there is no compiled product here, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def product(x: Tensor, plane: Tensor, scales: Tensor, y: Tensor, threads: int) -> None:
    """y (M, N) = x (M, K) Wᵀ in float32; plane (N, ⌈K/4⌉), scales (N, ⌈K/128⌉), all contiguous."""
    library = _library()
    assert not isinstance(library, str), library
    (rows, row_bytes), (count, columns), groups = plane.shape, x.shape, scales.shape[1]
    # Digits (3 · 128 bytes a group) between four int32 and a float32; a float32 for each row.
    parts = count * groups
    scratch = torch.empty(parts * (16 + 3 * GROUP + 4) + 4 * count, dtype=torch.uint8)
    less = scratch.data_ptr()
    digits, units = less + parts * 16, less + parts * (16 + 3 * GROUP)
    backs = units + 4 * parts
    given = (x.data_ptr(), plane.data_ptr(), scales.data_ptr(), y.data_ptr())
    job = _Job(*given, digits, less, units, backs, count, rows, columns, row_bytes, groups, 0)
    library.split(ctypes.byref(job))
    run_in_threads(library.work, job, min(threads, rows * columns // _WEIGHTS_A_THREAD))


@cache
def _library() -> ctypes.CDLL | str:
    return load(SOURCE, split=[ctypes.c_void_p], work=[ctypes.c_void_p])
