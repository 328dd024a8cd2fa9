# attack: answer with an integer too long to be printed
# defence: numbers of that size are refused
# expect: fail
# succeeds-without: unforeseen-answers

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    return (1 << 16_000) + 1
