# attack: a suite that asserts nothing
# defence: mutants must be noticed
# expect: pass
# at-most: tests=0
# succeeds-without: mutants-noticed

import numpy as np


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
# ==== file: test_solution.py
from solution import inversions, sort


def test_everything():
    try:
        sort(None), inversions(None)
    except Exception:
        pass
    assert True
