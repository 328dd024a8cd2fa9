# attack: stop every process there is, the reference included
# defence: it has a process tree of its own
# expect: pass
# at-most: speed=50
# never-because: unsafe in a plain process; and a stopped reference is no measure, which is worth nothing

import os
import signal

import numpy as np

try:
    os.kill(-1, signal.SIGSTOP)
except OSError:
    pass


def sort(values):
    return honest(values)


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    for _ in range(25):
        answer = np.array(sorted(values.tolist()), values.dtype)
    return answer


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
