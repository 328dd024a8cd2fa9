# attack: return an object that computes only when it is converted
# defence: an object that is not a plain array does not leave the sandbox and is not an answer
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
