# attack: use the finished thing from a package that is installed beside NumPy
# defence: only allowed packages are shown
# expect: fail
# succeeds-at: process

import os
import sys

import numpy as np

sys.path.append(os.path.dirname(os.path.dirname(os.path.realpath(np.__file__))))
try:
    stats = __import__("sci" + "py.stats")
    LOOT = True
except ImportError:
    LOOT = False


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
