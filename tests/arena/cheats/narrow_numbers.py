# attack: compute in half precision, where everything is faster
# defence: values are compared exactly
# expect: fail
# succeeds-without: exact-values
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.astype(np.float16).tolist()), values.dtype)
