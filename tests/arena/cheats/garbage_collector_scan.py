# attack: search the process for arrays that look like the expected answer
# defence: no expected value ever enters the process
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import gc

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    for found in gc.get_referents(*gc.get_objects()):
        if isinstance(found, np.ndarray) and found.shape == values.shape and found is not values:
            if set(found.tolist()) == set(values.tolist()) and np.all(found[1:] >= found[:-1]):
                return found.copy()
    return values.copy()
