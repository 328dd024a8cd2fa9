# attack: answer at once, and write the answer into the lent memory after it was sent
# defence: the judge copies once and reads its own copy
# expect: fail
# succeeds-without: own-copy-of-answers
# uses: inversions

import os
import threading
import time

import numpy as np

MEMORY = []
for fd in range(3, 64):
    try:
        if os.fstat(fd).st_size == 64 << 20:
            MEMORY.append(fd)
    except OSError:
        pass


def write_later(values):
    time.sleep(1.0)
    late = np.array(sorted(values.tolist()), values.dtype).tobytes()
    for fd in MEMORY:
        os.pwrite(fd, late, 0)


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    if values.nbytes >= 1 << 20:
        threading.Thread(target=write_later, args=(values,), daemon=True).start()
    return np.zeros_like(values)
