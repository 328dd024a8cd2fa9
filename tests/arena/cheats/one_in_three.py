# attack: solve every third timed call only and hope that the checked ones are among them
# defence: every answer of the bursts that decide is checked
# expect: pass
# at-most: speed=50
# succeeds-without: timed-answers-checked

import numpy as np

CALLS = 0


def sort(values):
    global CALLS
    CALLS += len(values) == 16384
    if len(values) == 16384 and CALLS % 3:
        return values.copy()
    return honest(values)


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    for _ in range(10):
        answer = np.array(sorted(values.tolist()), values.dtype)
    return answer


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
