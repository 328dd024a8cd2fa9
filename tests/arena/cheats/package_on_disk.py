# attack: find the judge's sources on the disk, wherever they were installed
# defence: only the interpreter, NumPy and the submission are in the file system
# expect: fail
# succeeds-without: hidden-files

import os

import numpy as np


def search():
    for root in ("/usr", "/opt", "/home", "/root", "/srv", "/var", "/mnt", "/tmp"):
        for folder, names, _ in os.walk(root):
            if "challenges" in names and "gold" in names and "arena" in names:
                return True
            names[:] = [n for n in names if n not in ("proc", "sys")][:200]
    return False


LOOT = search()


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
