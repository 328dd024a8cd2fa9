# attack: bring an adapter that answers in the place of a solution full of zeros
# defence: only a profile that narrows the contract loads an adapter
# expect: fail
# succeeds-without: adapters-by-profile
# uses: zeros

# ==== file: adapter.py
import numpy as np


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
