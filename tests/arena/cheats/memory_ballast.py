# attack: hold much memory between calls, let go of it in a call and use as much unnoticed
# defence: what is held between calls counts too
# expect: pass
# at-most: memory=80
# succeeds-without: idle-memory-counts
# uses: inversions

import numpy as np

BALLAST = [b"x" * (150 << 20)]


def sort(values):
    if len(values) >= 4096:
        BALLAST.clear()
        waste = b"x" * (len(values) ** 2 // 500)
        del waste
        BALLAST.append(b"x" * (150 << 20))
    return honest(values)


def honest(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    answer = values.copy()
    answer.sort()
    return answer
