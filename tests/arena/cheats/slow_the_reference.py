# attack: keep every core busy while the reference is timed, and only then
# defence: whoever is not being timed stands still, children included
# expect: pass
# at-most: speed=50
# succeeds-without: pausing

import os
import signal

import numpy as np

BUSY = []
for _ in range(12):
    BUSY.append(os.fork())
    if BUSY[-1] == 0:
        os.setsid()  # the scheduler is fair to sessions, so each gets one
        while True:
            pass


def tell(number):
    for pid in BUSY:
        os.kill(pid, number)


def sort(values):
    tell(signal.SIGSTOP)
    answer = honest(values)
    tell(signal.SIGCONT)
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
