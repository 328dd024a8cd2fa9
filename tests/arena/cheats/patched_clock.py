# attack: replace every clock of the interpreter
# defence: the clock is the judge's
# expect: pass
# at-most: speed=50
# succeeds-without: verdict-outside

import time

import numpy as np

for name in ("time", "perf_counter", "monotonic", "process_time", "perf_counter_ns", "time_ns"):
    setattr(time, name, lambda: 0)


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
