# attack: search the process for arrays that look like the expected answer
# defence: no expected value ever enters the process
# expect: fail

import gc

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    for found in gc.get_objects():
        if isinstance(found, np.ndarray) and found.shape == values.shape and found is not values:
            if found.size and np.all(found[1:] >= found[:-1]):
                return found.copy()
    return values.copy()


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
