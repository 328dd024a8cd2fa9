# attack: use files that the judge has left open
# defence: nothing but the channel is inherited
# expect: fail
# succeeds-without: closed-descriptors

import os
import stat

import numpy as np

LOOT = False
for fd in range(3, 256):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        continue
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and os.fstat(fd).st_size not in (0, 64 << 20)):
        LOOT = True


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
