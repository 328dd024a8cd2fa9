# attack: change one's own files for the next process
# defence: the folder is read-only, and every process gets the same bytes
# expect: fail
# succeeds-at: process

import os

import numpy as np

LOOT = os.path.exists(os.path.join(os.path.dirname(__file__), "owned"))
try:
    with open(os.path.join(os.path.dirname(__file__), "owned"), "w") as file:
        file.write("yes")
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
