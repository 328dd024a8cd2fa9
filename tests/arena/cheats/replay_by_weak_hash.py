# attack: remember the answer by a cheap digest of the input
# defence: values differ where no cheap digest looks
# expect: fail
# succeeds-without: fresh-values
# uses: inversions

import numpy as np

KEPT = {}


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    digest = (len(values), int(abs(values[:4]).sum() // 1000))
    return KEPT.setdefault(digest, np.array(sorted(values.tolist()), values.dtype))
