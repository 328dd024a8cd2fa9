"""Packed ternary products on a CPU: `packed_linear.c`, where a C compiler is available."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.c_library import load, run_in_threads
from trapline.gold.c_pointer import pointer

GROUP = 128
SOURCE = Path(__file__).with_name("packed_linear.c")
#: A thread with fewer weights than this finishes before another one has started.
_WEIGHTS_PER_THREAD = 1 << 20


class _Job(ctypes.Structure):
    """`struct job` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "plane", "scales", "y")),
        *((name, ctypes.c_void_p) for name in ("digits", "less", "units", "backs")),
        *((name, ctypes.c_long) for name in ("count", "rows", "columns", "row_bytes", "groups")),
        ("next", ctypes.c_long),
    )


def unavailable() -> str | None:
    """Why the compiled product is not available, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def product(x: Tensor, plane: Tensor, scales: Tensor) -> Tensor:
    """x (M, K) Wᵀ, float32 (M, N); plane (N, ⌈K/4⌉) uint8, scales (N, ⌈K/128⌉) float16.

    All are contiguous and in CPU memory; others are refused before any memory is touched.
    """
    library = _library()
    assert not isinstance(library, str), library
    (count, columns), rows = x.shape, len(plane)
    row_bytes, groups = cdiv(columns, 4), cdiv(columns, GROUP)
    y = torch.empty((count, rows), dtype=torch.float32, device="cpu")
    # Digits (3 · 128 bytes per group) between four int32 and a float32; a float32 for each row.
    parts = count * groups
    size = parts * (16 + 3 * GROUP + 4) + 4 * count
    scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
    less = pointer(scratch, torch.uint8, (size,))
    digits, units = less + parts * 16, less + parts * (16 + 3 * GROUP)
    job = _Job(
        pointer(x, torch.float32, (count, columns)),
        pointer(plane, torch.uint8, (rows, row_bytes)),
        pointer(scales, torch.float16, (rows, groups)),
        pointer(y, torch.float32, (count, rows)),
        *(digits, less, units, units + 4 * parts),
        *(count, rows, columns, row_bytes, groups, 0),
    )
    library.split(ctypes.byref(job))
    run_in_threads(
        library.work, job, min(torch.get_num_threads(), rows * columns // _WEIGHTS_PER_THREAD)
    )
    return y


@cache
def _library() -> ctypes.CDLL | str:
    return load(SOURCE, split=[ctypes.c_void_p], work=[ctypes.c_void_p])
