# attack: climb out of the scratch folder
# defence: the root inside is another one
# expect: fail
# succeeds-at: process

import os

import numpy as np

LOOT = False
for start in (os.getcwd(), os.path.dirname(__file__), "/proc/self/cwd", "/proc/1/cwd", "/dev/fd"):
    try:
        with open(start + "/.." * 20 + "/etc/passwd") as file:
            LOOT = LOOT or "root" in file.read()
    except OSError:
        pass


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
