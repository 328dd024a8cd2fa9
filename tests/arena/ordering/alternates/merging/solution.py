"""Merge sort from halves, each placed by where it would stand in the other."""

import numpy as np


def sort(values):
    values = np.asarray(values)
    if values.ndim != 1:
        raise ValueError("expected a vector")
    runs = [values[i : i + 1] for i in range(len(values))] or [values.copy()]
    while len(runs) > 1:
        pairs = [merge(*runs[i : i + 2]) for i in range(0, len(runs) - 1, 2)]
        runs = pairs + runs[len(pairs) * 2 :]
    return runs[0].copy()


def merge(left, right):
    merged = np.empty(len(left) + len(right), left.dtype)
    merged[np.arange(len(left)) + np.searchsorted(right, left, "left")] = left
    merged[np.arange(len(right)) + np.searchsorted(left, right, "right")] = right
    return merged


def inversions(values):
    values = np.asarray(values)
    if len(values) < 2:
        return 0
    left, right = values[: len(values) // 2], values[len(values) // 2 :]
    across = len(left) * len(right) - int(np.searchsorted(sort(left), right, "right").sum())
    return inversions(left) + inversions(right) + across
