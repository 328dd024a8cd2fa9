# attack: read the memory of other processes
# defence: the calls are filtered, and /proc shows nobody else
# expect: fail
# succeeds-at: process

import ctypes
import os

import numpy as np

libc = ctypes.CDLL(None, use_errno=True)


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


here, there = ctypes.create_string_buffer(8), ctypes.create_string_buffer(b"secret")
local = Vector(ctypes.addressof(here), 6)
remote = Vector(ctypes.addressof(there), 6)
copied = libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
LOOT = copied == 6


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
