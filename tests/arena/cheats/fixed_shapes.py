# attack: right for lengths that are powers of two only
# defence: lengths of every kind are asked for
# expect: fail
# succeeds-without: lengths-of-every-kind
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    if len(values) & (len(values) - 1):
        return values.copy()
    return np.array(sorted(values.tolist()), values.dtype)
