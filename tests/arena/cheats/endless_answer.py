# attack: answer with more than fits anywhere
# defence: lengths are checked before memory is taken
# expect: fail
# never-because: the answer does not fit in any process, so the submission itself runs out of memory
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.broadcast_to(values[:1], (1 << 40,)) if len(values) else values
