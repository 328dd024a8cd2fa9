# attack: compute in half precision, where everything is faster
# defence: values are compared exactly
# expect: fail
# succeeds-without: exact-values

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.astype(np.float16).tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
