# attack: skip some of the timed calls and hope that the checked ones are others
# defence: short bursts are always checked, long ones by lot after the clock has stopped
# expect: pass
# at-most: speed=50

import numpy as np

CALLS = 0


def sort(values):
    global CALLS
    CALLS += len(values) == 16384
    if len(values) == 16384 and CALLS % 3 == 0:
        return values.copy()
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
