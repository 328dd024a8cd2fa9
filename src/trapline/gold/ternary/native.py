"""The CPU's packed product: `packed_cpu.c`, compiled when first needed with the system's compiler.

Without a compiler there is no product of this kind, and `unavailable()` says why; `fast` then takes
torch. Each process compiles for itself (a third of a second): nothing stale is ever loaded.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

GROUP = 128
SOURCE = Path(__file__).with_name("packed_cpu.c")
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
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
        library.split(_at(vector), columns, groups, _at(digits), _at(units), _at(sums))
        fixed = [_at(a) for a in (plane, scales, digits, units, sums, out)]

        def part(number: int, fixed: list[ctypes.c_void_p] = fixed) -> None:
            first, last = rows * number // count, rows * (number + 1) // count
            library.multiply(*fixed, first, last, row_bytes, groups)

        _spread(part, count)


def _spread(part: Callable[[int], None], count: int) -> None:
    """Runs the parts in threads; ctypes lets go of the interpreter's lock during a call."""
    if count == 1:
        part(0)
        return
    waiting = [_pool().submit(part, number) for number in range(1, count)]
    part(0)
    for one in waiting:
        one.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="ternary")


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@cache
def _library() -> ctypes.CDLL | str:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang)"
    with tempfile.TemporaryDirectory(prefix="trapline-") as folder:
        made = Path(folder) / "packed_cpu.so"
        command = [compiler, *_FLAGS, str(SOURCE), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                return f"{compiler} failed: {done.stderr.strip()[-200:]}"
            library = ctypes.CDLL(str(made))
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} failed: {error}"
    long, pointer = ctypes.c_long, ctypes.c_void_p
    library.split.argtypes = [pointer, long, long, pointer, pointer, pointer]
    library.multiply.argtypes = [pointer] * 6 + [long] * 4
    library.split.restype = library.multiply.restype = None
    return library
