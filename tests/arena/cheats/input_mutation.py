# attack: zero the input, so that a reference computed from it afterwards agrees
# defence: the judge keeps its own copy
# expect: fail
# succeeds-without: own-copy-of-inputs
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    values[:] = 0.0
    return np.zeros_like(values)
