# attack: an answer of the right shape with nothing in it
# defence: the oracle stays with the judge and knows the values
# expect: fail
# succeeds-without: values-compared

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.zeros_like(values)


def inversions(values):
    return 0
