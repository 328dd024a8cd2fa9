"""The CPU's packed product: `packed_cpu.c`. Without a compiler `fast` takes torch instead."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trapline.gold.native import built, spread

GROUP = 128
SOURCE = Path(__file__).with_name("packed_cpu.c")
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
    team = max(1, min(threads, rows * columns // _WEIGHTS_A_THREAD))
    parallel = None if team == 1 or _forked else _torchs_threads()
    if parallel is None:
        spread(lambda number: library.work(ctypes.byref(job)), team)
    else:
        parallel(ctypes.cast(library.work, ctypes.c_void_p), ctypes.byref(job), team, 0)


@cache
def _library() -> ctypes.CDLL | str:
    library = built(SOURCE)
    if isinstance(library, str):
        return library
    library.split.argtypes = library.work.argtypes = [ctypes.c_void_p]
    library.split.restype = library.work.restype = None
    return library


@cache
def _torchs_threads() -> Callable[..., Any] | None:
    """GNU OpenMP's way to run a function in a team of threads, where torch has brought it.

    They are the threads of torch's own products: warm, and not in each other's way.
    """
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel = found.GOMP_parallel
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    parallel.argtypes, parallel.restype = [pointer, pointer, number, number], None
    return parallel


_forked = False


def _after_a_fork() -> None:
    """OpenMP's threads do not survive a fork, and it waits for them forever."""
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_a_fork)
