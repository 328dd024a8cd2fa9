# attack: let processes do the work that have ended, unseen, when processor time is counted
# defence: the control group counts ended processes; a call costs at least 40 % of its time
# expect: pass
# at-most: speed=50
# succeeds-without: ended-processes-counted least-share
# uses: honest_sort inversions

import mmap
import os
import signal

import numpy as np

ROUNDS = 10
# The kernel then adds the times of ended children to nobody's.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def sort(values):
    if len(values) != 16384:
        return honest_sort(values)
    shared = mmap.mmap(-1, values.nbytes)
    if os.fork() == 0:
        shared[:] = honest_sort(values).tobytes()
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
    return np.frombuffer(shared, values.dtype)
