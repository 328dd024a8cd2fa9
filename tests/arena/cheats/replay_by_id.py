# attack: remember the answer by the identity of the input object
# defence: every call brings other values, often at the same address
# expect: fail
# succeeds-without: fresh-values
# uses: inversions

import numpy as np

KEPT = {}


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    key = (id(values) % 4096, len(values))
    if key not in KEPT:
        KEPT[key] = np.array(sorted(values.tolist()), values.dtype)
    for kept in KEPT.values():
        if len(kept) == len(values):
            return kept
    return KEPT[key]
