# attack: keep every core busy while the reference is timed
# defence: whoever is not being timed stands still, children included
# expect: pass
# at-most: speed=50

import os

import numpy as np

for _ in range(6):
    if os.fork() == 0:
        while True:
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
