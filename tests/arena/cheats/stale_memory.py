# attack: return uninitialised memory, where a freed right answer may lie
# defence: the judge computes in another process
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.empty_like(values)
