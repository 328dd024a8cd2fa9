"""Seconds and peak memory of a call, for the other examples (Linux)."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

#: Largest resident size of this process since the last reset, in the kernel's own figures.
_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class Measured(NamedTuple):
    """What a call returned, and what it took."""

    result: Any
    ms: float
    mib: float


def measured(call: Callable[..., Any], *args: Any) -> Measured:
    """Calls once to warm up, then once with a clock; memory is the growth of the peak."""
    call(*args)
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5")
    before = _peak_kib()
    began = time.perf_counter()
    result = call(*args)
    return Measured(result, 1e3 * (time.perf_counter() - began), (_peak_kib() - before) / 1024)


def _peak_kib() -> int:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])
