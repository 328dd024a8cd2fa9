# attack: sort the first quarter only and hope that the tail is not looked at
# defence: every element is compared
# expect: fail
# succeeds-without: every-element-compared
# uses: inversions

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    quarter = len(values) // 4
    answer = np.partition(values, quarter) if len(values) else values.copy()
    answer[: quarter + 1].sort()
    return answer
