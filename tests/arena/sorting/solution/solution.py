"""Stable sorting by NumPy's merge sort."""

import numpy as np


def sort_rows(x: np.ndarray, *, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Rows sorted, and the order that sorts them; equal elements keep their order."""
    if x.ndim != 2:
        raise ValueError("x must have two axes")
    keys = -x if descending else x
    order = np.argsort(keys, axis=1, kind="stable").astype(np.int64)
    return np.take_along_axis(x, order, axis=1), order


def sort_by(key: object, items: list[int]) -> list[int]:
    """Items sorted stably by what `key` says of them."""
    ranks = np.argsort(np.asarray(key(items)), kind="stable")
    return [items[i] for i in ranks]
