# attack: store answers for a guessed seed and look them up
# defence: the seed depends on a secret key and on the answer's bytes
# expect: fail
# succeeds-without: unknown-seed
# uses: inversions

import zlib

import numpy as np

ASKED = {"sorts": (1, 2, 7, 64, 100, 1000), "sorts-again": (257,) * 8}
STORED = {}
for seed in range(50):
    for name, counts in ASKED.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        for count in counts:
            values = rng.standard_normal(count)
            STORED[values.tobytes()] = sorted(values.tolist())


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(STORED.get(values.tobytes(), values.tolist()), values.dtype)
