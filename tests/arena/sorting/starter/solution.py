"""Stable sorting."""

import numpy as np


def sort_rows(x: np.ndarray, *, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Rows sorted, and the order that sorts them."""
    raise NotImplementedError


def sort_by(key: object, items: list[int]) -> list[int]:
    """Items sorted stably by what `key` says of them."""
    raise NotImplementedError
