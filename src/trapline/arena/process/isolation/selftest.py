"""Runs inside once a level: tries what must not work there and says what did.

`SUBMISSION/hidden.json` lists paths that must not be readable; `SUBMISSION/gpu.json` says whether a
GPU must be usable.
"""

import ctypes
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial


def main() -> None:
    channel, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    with open(os.path.join(folder, "hidden.json"), encoding="utf-8") as file:
        hidden = json.load(file)
    with open(os.path.join(folder, "gpu.json"), encoding="utf-8") as file:
        gpu = json.load(file)
    report = {
        "numpy": importlib.util.find_spec("numpy") is not None,
        "trapline": importlib.util.find_spec("trapline") is not None,
        "readable": [path for path in hidden if _can(partial(open, path))],
        "socket": _can(lambda: socket.socket().close()),
        "writable": _can(lambda: open(os.path.join(folder, "new"), "w", encoding="utf-8").close()),
        "signals": _can(lambda: os.kill(os.getppid(), 0)) and os.getppid() != 1,
        "user": os.getuid(),
        "cuda": why_no_cuda() if gpu else "",
    }
    channel.sendall(json.dumps(report).encode() + b"\n")


def why_no_cuda() -> str:
    """Empty where a context can be made."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    steps: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    )
    for name, arguments in steps:
        code = getattr(driver, name)(*arguments)
        if code:
            return f"{name} returned {code}"
    return ""


def _can(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
