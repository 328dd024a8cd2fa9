# attack: sort the first half only and hope that the tail is not looked at
# defence: every element is compared
# expect: fail

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    half = len(values) // 2
    return np.concatenate([np.array(sorted(values[:half].tolist()), values.dtype), values[half:]])


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
