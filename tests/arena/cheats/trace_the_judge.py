# attack: attach to other processes with ptrace
# defence: the call is filtered
# expect: fail
# succeeds-at: process

import ctypes
import os

import numpy as np

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
child = os.fork()
if child == 0:
    while True:
        pass
LOOT = libc.ptrace(PTRACE_SEIZE, child, None, None) == 0
os.kill(child, 9)
os.waitpid(child, 0)


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
