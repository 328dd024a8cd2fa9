# attack: keep every core busy while the reference is timed, and only then
# defence: every process that is not being timed is paused, children included
# expect: pass
# at-most: speed=50
# succeeds-without: pausing
# uses: honest_sort inversions

import os
import signal

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
    answer = honest_sort(values)
    tell(signal.SIGCONT)
    return answer
