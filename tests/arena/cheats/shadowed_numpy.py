# attack: bring a NumPy of one's own that compares as one likes
# defence: the judge has its own; the worker has imported the real one before
# expect: fail

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.zeros_like(values)


def inversions(values):
    return 0
# ==== file: numpy.py
def zeros_like(values):
    return values


def __getattr__(name):
    return lambda *args, **kwargs: True
# ==== file: json.py
def dumps(value):
    return '{"state": "pass"}'


loads = dumps
