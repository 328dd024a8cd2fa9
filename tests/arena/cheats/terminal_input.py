# attack: type into the judge's terminal
# defence: no terminal, and the call is filtered
# expect: fail
# never-because: it needs a terminal, and newer kernels refuse the call themselves

import fcntl
import os

import numpy as np

LOOT = False
TIOCSTI = 0x5412
for path in ("/dev/tty", "/dev/console", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"):
    try:
        fcntl.ioctl(os.open(path, os.O_RDWR), TIOCSTI, b"x")
        LOOT = True
    except OSError:
        pass


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
