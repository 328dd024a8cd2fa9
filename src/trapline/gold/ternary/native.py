"""The CPU's packed product: `packed_cpu.c`. Without a compiler `fast` takes torch instead."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from trapline.gold.native import at, built, spread

GROUP = 128
SOURCE = Path(__file__).with_name("packed_cpu.c")
#: Fewer weights than this a thread are done before another thread has started.
_WEIGHTS_A_THREAD = 1 << 20


def unavailable() -> str | None:
    """Why there is no compiled product here, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def product(
    x: np.ndarray, plane: np.ndarray, scales: np.ndarray, y: np.ndarray, threads: int
) -> None:
    """y (M, N) = x (M, K) Wᵀ in float32; plane (N, ⌈K/4⌉), scales (N, ⌈K/128⌉), all contiguous."""
    library = _library()
    assert not isinstance(library, str), library
    rows, row_bytes = plane.shape
    columns, groups = x.shape[1], scales.shape[1]
    digits = np.empty((groups, 3, GROUP), dtype=np.int8)
    units, sums = np.empty(groups, dtype=np.float32), np.empty(groups, dtype=np.int32)
    count = max(1, min(threads, rows * columns // _WEIGHTS_A_THREAD))
    for vector, out in zip(x, y, strict=True):
        library.split(at(vector), columns, groups, at(digits), at(units), at(sums))
        fixed = [at(a) for a in (plane, scales, digits, units, sums, out)]

        def part(number: int, fixed: list[ctypes.c_void_p] = fixed) -> None:
            first, last = rows * number // count, rows * (number + 1) // count
            library.multiply(*fixed, first, last, row_bytes, groups)

        spread(part, count)


@cache
def _library() -> ctypes.CDLL | str:
    library = built(SOURCE)
    if isinstance(library, str):
        return library
    long, pointer = ctypes.c_long, ctypes.c_void_p
    library.split.argtypes = [pointer, long, long, pointer, pointer, pointer]
    library.multiply.argtypes = [pointer] * 6 + [long] * 4
    library.split.restype = library.multiply.restype = None
    return library
