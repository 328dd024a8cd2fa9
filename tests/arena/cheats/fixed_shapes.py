# attack: right for lengths that are powers of two only
# defence: lengths of every kind are asked for
# expect: fail
# succeeds-without: lengths-of-every-kind

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    if len(values) & (len(values) - 1):
        return values.copy()
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
