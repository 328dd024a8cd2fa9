# attack: skip the rest of one long burst: the fastest counts, and one answer a burst is checked
# defence: every answer of the bursts that decide is checked
# expect: pass
# at-most: speed=50
# succeeds-without: timed-answers-checked

import time

import numpy as np

LAST, IN_BURST, SKIPPED = 0.0, 0, 0


def sort(values):
    global LAST, IN_BURST, SKIPPED
    if len(values) != 16384:
        return honest(values)
    IN_BURST = IN_BURST + 1 if time.perf_counter() - LAST < 0.002 else 1
    skips = IN_BURST > 1 and SKIPPED < 3
    SKIPPED += skips
    answer = values.copy() if skips else honest(values)
    LAST = time.perf_counter()
    return answer


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    for _ in range(10):
        answer = np.array(sorted(values.tolist()), values.dtype)
    return answer


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
