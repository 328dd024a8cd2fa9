# attack: answer with more than fits anywhere
# defence: lengths are checked before memory is taken
# expect: fail
# never-because: no process can hold it: it dies of its own answer, whoever asks
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.broadcast_to(values[:1], (1 << 40,)) if len(values) else values
