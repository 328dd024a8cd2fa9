import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.zeros_like(values)


def inversions(values):
    return 0
