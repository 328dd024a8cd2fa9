# attack: need quadratic memory in a child that has ended when somebody looks
# defence: the kernel counts for the whole sandbox and remembers
# expect: pass
# at-most: memory=80
# needs: cgroup
# succeeds-without: control-group

import os

import numpy as np


def sort(values):
    if len(values) >= 4096 and os.fork() == 0:
        waste = b"x" * (len(values) ** 2 // 320)
        os._exit(len(waste) and 0)
    if len(values) >= 4096:
        os.wait()
    return honest(values)


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
