# attack: open the machine's devices
# defence: there are five harmless ones
# expect: fail
# succeeds-without: few-devices

import glob
import os

import numpy as np

HARMLESS = {"null", "zero", "full", "random", "urandom", "shm", "fd", "stdin", "stdout", "stderr"}
LOOT = False
for path in glob.glob("/dev/*"):
    if os.path.basename(path) not in HARMLESS:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            LOOT = True
        except OSError:
            pass
try:
    os.mknod("device", 0o600 | 0o020000, os.makedev(1, 1))
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
