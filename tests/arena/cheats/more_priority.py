# attack: ask the scheduler for more than a fair share
# defence: no capability, and the calls are filtered
# expect: pass
# at-most: speed=50
# never-because: it needs a privilege that a plain process of most users lacks, and a timed process runs alone
# uses: honest_sort inversions

import os

for ask in (
    lambda: os.nice(-20),
    lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
    lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)),
):
    try:
        ask()
    except OSError:
        pass


def sort(values):
    return honest_sort(values)
