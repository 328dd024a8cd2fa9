# attack: change a large answer in the lent memory after it was sent
# defence: the judge copies once and reads its own copy
# expect: fail

import os
import threading

import numpy as np

MEMORY = []
for fd in range(3, 64):
    try:
        if os.fstat(fd).st_size == 64 << 20:
            MEMORY.append(fd)
    except OSError:
        pass


def scribble():
    while True:
        for fd in MEMORY:
            os.pwrite(fd, b"\0" * 4096, 0)


threading.Thread(target=scribble, daemon=True).start()


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return values.copy()


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
