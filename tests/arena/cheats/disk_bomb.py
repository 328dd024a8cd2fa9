# attack: fill the disk
# defence: the scratch folder is small and in memory
# expect: fail
# never-because: unsafe: it would fill the disk (TestBombs lets a small one off)

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    for number in range(10_000):
        with open(f"bomb{number}", "wb") as file:
            file.write(bytes(1 << 24))


def inversions(values):
    return 0
