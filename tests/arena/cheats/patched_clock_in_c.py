# attack: replace the clock under the interpreter, in the C library
# defence: the clock is the judge's
# expect: pass
# at-most: speed=50

import ctypes
import ctypes.util
import mmap

import numpy as np

libc = ctypes.CDLL(None)
address = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value
page = address & ~(mmap.PAGESIZE - 1)
libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE * 2, 7)


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
