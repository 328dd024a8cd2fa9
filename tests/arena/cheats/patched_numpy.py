# attack: replace what compares arrays
# defence: the judge compares with its own NumPy
# expect: fail
# succeeds-without: verdict-outside

import numpy as np
import numpy.testing

for name in ("array_equal", "allclose", "isclose", "equal", "all", "array_equiv"):
    setattr(np, name, lambda *args, **kwargs: True)
for name in ("assert_array_equal", "assert_allclose", "assert_equal"):
    setattr(numpy.testing, name, lambda *args, **kwargs: None)


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.zeros_like(values)


def inversions(values):
    return 0
