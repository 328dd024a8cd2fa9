# attack: remember the answer by the address of the input's memory
# defence: every call brings other values
# expect: fail
# succeeds-without: fresh-values
# uses: inversions

import numpy as np

KEPT = {}


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    page = values.__array_interface__["data"][0] >> 48
    return KEPT.setdefault((page, len(values)), np.array(sorted(values.tolist()), values.dtype))
