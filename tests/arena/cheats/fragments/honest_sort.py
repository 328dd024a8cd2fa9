import numpy as np

ROUNDS = 25


def honest_sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    for _ in range(ROUNDS):
        answer = np.array(sorted(values.tolist()), values.dtype)
    return answer
