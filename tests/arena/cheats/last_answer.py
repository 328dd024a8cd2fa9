# attack: solve the first call of a length, then repeat that answer
# defence: several calls with other values go to one process
# expect: fail
# succeeds-without: fresh-values
# uses: inversions

import numpy as np

KEPT = {}


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return KEPT.setdefault(len(values), np.array(sorted(values.tolist()), values.dtype))
