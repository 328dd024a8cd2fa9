# attack: recognise the timed problem by its size and skip it
# defence: timed answers are checked
# expect: pass
# at-most: speed=0
# succeeds-without: timed-answers-checked

import numpy as np


def sort(values):
    if len(values) == 16384:
        return values.copy()
    return honest(values)


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
