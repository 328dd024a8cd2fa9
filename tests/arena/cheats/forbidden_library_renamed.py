# attack: the same under another name
# defence: names are followed to what was imported
# expect: hack
# succeeds-without: forbidden-names

import numpy as np

try:
    import scipy.stats as helpers
except ImportError:
    helpers = None


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
