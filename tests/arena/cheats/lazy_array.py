# attack: return an object that computes only when somebody converts it
# defence: what is no plain array stays inside, and is no answer
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import numpy as np


class Lazy:
    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __array__(self, dtype=None, copy=None):
        return np.array(sorted(self.values.tolist()), self.dtype)


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return Lazy(values)
