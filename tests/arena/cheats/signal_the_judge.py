# attack: end, stop or at least find the judge by its process number
# defence: a process tree of its own
# expect: fail
# succeeds-at: process

import os

import numpy as np

LOOT = False
for pid in [os.getppid(), *range(3, 3000)]:
    if pid in (0, 1) or pid == os.getpid():
        continue
    try:
        os.kill(pid, 0)
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
