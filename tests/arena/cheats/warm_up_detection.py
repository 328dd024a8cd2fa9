# attack: work during the warm-up and answer with nothing once the clock may run
# defence: warm-up and timed calls look alike, and timed answers are checked
# expect: pass
# at-most: speed=0
# succeeds-without: timed-answers-checked
# uses: honest_sort inversions

import numpy as np

ROUNDS = 1

CALLS = 0


def sort(values):
    global CALLS
    CALLS += len(values) == 16384
    if CALLS > 1:
        return np.zeros_like(values)
    return honest_sort(values)
