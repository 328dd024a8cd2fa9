# attack: answer NaN everywhere: a comparison with NaN may be skipped or always hold
# defence: NaN matches only NaN
# expect: fail
# succeeds-without: nan-is-no-number
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.full_like(values, np.nan)
