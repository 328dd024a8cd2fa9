# attack: answer with an array of objects that equal everything
# defence: arrays of objects cannot be sent
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import numpy as np


class Equal:
    def __eq__(self, other):
        return True


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    answer = np.empty(values.shape, object)
    answer[:] = Equal()
    return answer
