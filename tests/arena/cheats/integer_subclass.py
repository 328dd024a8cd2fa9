# attack: answer with an integer whose comparison always holds
# defence: raw numbers are sent, without their class
# expect: fail
# succeeds-without: verdict-outside

import numpy as np


class Agreeable(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def inversions(values):
    return Agreeable(0)


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)
