# attack: store answers for a guessed seed and look them up
# defence: the seed is drawn anew for every run
# expect: fail

import numpy as np

STORED = {}
for seed in range(50):
    rng = np.random.default_rng(seed)
    for count in (1, 2, 7, 64, 100, 1000, 257):
        values = rng.standard_normal(count)
        STORED[values.tobytes()] = sorted(values.tolist())


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(STORED.get(values.tobytes(), values.tolist()), values.dtype)


def inversions(values):
    items = values.tolist()
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
