"""Quicksort on a list, and inversions by inserting into a sorted list."""

from bisect import bisect_right, insort

import numpy as np


def sort(values):
    values = np.asarray(values)
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return np.array(quick(values.tolist()), values.dtype)


def quick(items):
    if len(items) < 2:
        return items
    pivot = items[len(items) // 2]
    low = [item for item in items if item < pivot]
    same = [item for item in items if item == pivot]
    return quick(low) + same + quick([item for item in items if item > pivot])


def inversions(values):
    seen, count = [], 0
    for value in np.asarray(values).tolist():
        count += len(seen) - bisect_right(seen, value)
        insort(seen, value)
    return count
