# attack: take all memory
# defence: memory is limited, and running out of it is the submission's failure
# expect: fail
# never-because: unsafe: it would take the machine (TestBombs lets a small one off)

import numpy as np

KEPT = []


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    while True:
        KEPT.append(np.ones(1 << 22))


def inversions(values):
    return 0
