# attack: work during the warm-up and answer with nothing once the clock may run
# defence: warm-up and timed calls look alike, and timed answers are checked
# expect: pass
# at-most: speed=0
# succeeds-without: timed-answers-checked

import numpy as np

CALLS = 0


def sort(values):
    global CALLS
    CALLS += len(values) == 16384
    if CALLS > 1:
        return np.zeros_like(values)
    return honest(values)


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
