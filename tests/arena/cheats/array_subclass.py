# attack: answer with an array whose comparison always holds
# defence: raw bytes are sent, without their class
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import numpy as np


class Agreeable(np.ndarray):
    def __eq__(self, other):
        return np.ones(self.shape, bool)

    def __array_ufunc__(self, *args, **kwargs):
        return np.ones(self.shape, bool)


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return values.copy().view(Agreeable)
