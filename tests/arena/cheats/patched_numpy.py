# attack: replace what compares arrays
# defence: the judge compares with its own NumPy
# expect: fail
# succeeds-without: verdict-outside
# uses: zeros

import numpy as np
import numpy.testing

for name in ("array_equal", "allclose", "isclose", "equal", "all", "array_equiv"):
    setattr(np, name, lambda *args, **kwargs: True)
for name in ("assert_array_equal", "assert_allclose", "assert_equal"):
    setattr(numpy.testing, name, lambda *args, **kwargs: None)
