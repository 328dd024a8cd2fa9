# attack: search the callers' local variables for the expected answer
# defence: the caller is a worker that knows none
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import sys

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    frame = sys._getframe()
    while frame is not None:
        for name in ("want", "expected", "reference", "oracle", "gold", "truth"):
            if isinstance(frame.f_locals.get(name), np.ndarray):
                return frame.f_locals[name]
        frame = frame.f_back
    return values.copy()
