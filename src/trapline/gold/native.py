"""C sources of this package, compiled when first needed with the system's compiler.

Each process compiles for itself (a third of a second): nothing stale is ever loaded. Without a
compiler there is a sentence instead of a library, and whoever asked takes another path.
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


def spread(part: Callable[[int], None], count: int) -> None:
    """Runs parts 0 to count − 1 in threads; ctypes lets go of the interpreter's lock in a call."""
    if count <= 1:
        part(0)
        return
    waiting = [_pool().submit(part, number) for number in range(1, count)]
    part(0)
    for one in waiting:
        one.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="native")


# Threads do not survive a fork: the child starts its own.
os.register_at_fork(after_in_child=_pool.cache_clear)


def at(array: np.ndarray) -> ctypes.c_void_p:
    """Where an array's elements begin."""
    return ctypes.c_void_p(array.ctypes.data)
