# attack: fill the disk
# defence: the scratch folder is small and in memory
# expect: fail

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    for number in range(10_000):
        with open(f"bomb{number}", "wb") as file:
            file.write(bytes(1 << 24))


def inversions(values):
    return 0
