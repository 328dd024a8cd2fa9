# attack: be longer than anybody will read
# defence: what cannot be read does not pass where something is forbidden
# expect: fail
# succeeds-without: readable-code

import numpy as np

try:
    import scipy.stats
except ImportError:
    pass


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
# ==== file: helper.py
{half a megabyte}
