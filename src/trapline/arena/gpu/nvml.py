"""What the driver's management library says of GPU 0; it needs no GPU context."""

import ctypes
from functools import cache
from typing import Any

_TEXT = 96
#: Kinds of clocks, as NVML numbers them.
_CLOCKS = {"sm MHz": 1, "memory MHz": 2}


@cache
def _library() -> Any:
    """NVML, initialised; None where it is missing or refuses."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def driver_version() -> str:
    """The version of the NVIDIA driver, such as 580.95; empty where it is unknown."""
    library, text = _library(), ctypes.create_string_buffer(_TEXT)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT)):
        return ""
    return text.value.decode()


def state() -> dict[str, int]:
    """Clocks and temperature at this moment; empty where they are unknown."""
    library, device = _library(), ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return {}
    found, value = {}, ctypes.c_uint()
    for name, kind in _CLOCKS.items():
        if not library.nvmlDeviceGetClockInfo(device, ctypes.c_int(kind), ctypes.byref(value)):
            found[name] = value.value
    if not library.nvmlDeviceGetTemperature(device, ctypes.c_int(0), ctypes.byref(value)):
        found["celsius"] = value.value
    return found
