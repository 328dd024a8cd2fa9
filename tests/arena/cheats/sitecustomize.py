# attack: be loaded before everything else
# defence: the interpreter is isolated and looks for no such file
# expect: fail
# succeeds-without: isolated-interpreter

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.zeros_like(values)


def inversions(values):
    return 0
# ==== file: sitecustomize.py
import os

os._exit(0)
# ==== file: usercustomize.py
import os

os._exit(0)
# ==== file: solution.pth
import os; os._exit(0)
