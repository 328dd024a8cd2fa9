# attack: be slow at the start of every burst until only long bursts can follow
# defence: a burst cannot take less than its calls do
# expect: pass
# at-most: speed=50
# succeeds-without: least-share random-burst-order

import time

import numpy as np

CALLS, LAST, BURSTS = 0, 0.0, []


def sort(values):
    global LAST
    if len(values) == 16384:
        now = time.perf_counter()
        if now - LAST > 0.002:
            BURSTS.append(0)
        BURSTS[-1] += 1
        ended = BURSTS[1:-1]
        if BURSTS[-1] == 1 and ended.count(1) < 3:
            time.sleep(0.3)
    answer = honest(values)
    LAST = time.perf_counter()
    return answer


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    for _ in range(25):
        answer = np.array(sorted(values.tolist()), values.dtype)
    return answer


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
