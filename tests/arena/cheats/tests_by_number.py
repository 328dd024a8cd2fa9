# attack: a suite that passes in the first runs and fails in all later ones
# defence: own code, rewrites and mutants come in random order
# expect: pass
# at-most: tests=20
# succeeds-without: random-order-of-runs

import numpy as np


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
# ==== file: test_solution.py
import os

HERE = os.path.dirname(os.path.abspath(__file__))
COUNTER = os.path.join(os.path.dirname(HERE), "counter")


def test_is_among_the_first():
    with open(COUNTER, "a") as file:
        file.write("x")
    assert os.path.getsize(COUNTER) <= 5
