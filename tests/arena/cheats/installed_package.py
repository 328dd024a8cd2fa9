# attack: import the judge itself and use its own answers
# defence: the package is not on the import path and not in the file system
# expect: fail
# succeeds-without: isolated-interpreter sandbox

import importlib
import sys

import numpy as np

try:
    importlib.import_module("trapline.arena.judge.grade")
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
