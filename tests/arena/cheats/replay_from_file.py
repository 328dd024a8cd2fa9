# attack: leave answers in a file for later processes to find
# defence: every process gets an empty scratch folder of its own
# expect: fail
# succeeds-without: private-scratch

import os

import numpy as np

PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", os.path.expanduser("~"), os.path.dirname(__file__))
FILES = [os.path.join(place, "answers.bin") for place in PLACES]
LOOT = any(map(os.path.exists, FILES))
for path in FILES:
    try:
        with open(path, "a") as file:
            file.write("seen\n")
    except OSError:
        pass


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
