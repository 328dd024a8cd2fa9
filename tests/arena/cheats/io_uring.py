# attack: do input and output behind the filter's back
# defence: the calls are filtered, and no memory may be locked for them
# expect: fail
# succeeds-without: system-call-filter resource-limits

import ctypes

import numpy as np

libc = ctypes.CDLL(None, use_errno=True)
LOOT = libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
