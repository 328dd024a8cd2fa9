# attack: take all memory
# defence: memory is limited, and its end is the submission's
# expect: fail

import numpy as np

KEPT = []


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    while True:
        KEPT.append(np.ones(1 << 22))


def inversions(values):
    return 0
