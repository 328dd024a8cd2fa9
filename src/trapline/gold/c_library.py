"""C sources of this package, compiled when first needed with the system's compiler, and threads.

Each process compiles for itself (a third of a second): nothing stale is ever loaded. Without a
compiler there is a sentence instead of a library, and whoever asked takes another path.

What threads share is a job: a structure that every one of them takes parts of, until none is left.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-shared", "-fPIC")
#: Not every compiler knows every processor; code for all of its kind is slower, but right.
_PROCESSORS = (("-march=native",), ())


def built(source: Path) -> ctypes.CDLL | str:
    """The library made of one C file, or why there is none."""
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang)"
    with tempfile.TemporaryDirectory(prefix="trapline-") as folder:
        made = Path(folder) / f"{source.stem}.so"
        said = ""
        for processor in _PROCESSORS:
            command = [compiler, *_FLAGS, *processor, str(source), "-o", str(made), "-lm"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=120, check=False
                )
                if not done.returncode:
                    return ctypes.CDLL(str(made))
                said = done.stderr.strip()[-200:]
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"{compiler} failed: {error}"
    return f"{compiler} failed: {said}"


def share(work: Any, job: ctypes.Structure, threads: int) -> None:
    """Calls the C function `work` with `job` in up to so many threads at once.

    They are the threads of torch's own operations: warm, and not in each other's way. Where there
    are none of that kind, this one does it all.
    """
    parallel = None if threads <= 1 or _forked else _torchs_threads()
    if parallel is None:
        work(ctypes.byref(job))
    else:
        parallel(ctypes.cast(work, ctypes.c_void_p), ctypes.byref(job), threads, 0)


def _torchs_threads() -> Callable[..., Any] | None:
    """How to run a function in a team of them; without torch there are none."""
    torch = sys.modules.get("torch")
    return None if torch is None or torch.__file__ is None else _openmp(torch.__file__)


@cache
def _openmp(torch: str) -> Callable[..., Any] | None:
    """GNU OpenMP's `GOMP_parallel`, where torch has brought it."""
    try:
        parallel = ctypes.CDLL(str(Path(torch).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
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


def at(array: np.ndarray) -> ctypes.c_void_p:
    """Where an array's elements begin."""
    return ctypes.c_void_p(array.ctypes.data)
