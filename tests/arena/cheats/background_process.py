# attack: the same with a child process and shared memory
# defence: the bytes are on the wire before the clock stops
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import mmap
import os
import time

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    shared = mmap.mmap(-1, max(1, values.nbytes))
    answer = np.frombuffer(shared, values.dtype, len(values))
    if os.fork() == 0:
        time.sleep(0.02)
        answer[:] = sorted(values.tolist())
        os._exit(0)
    return answer
