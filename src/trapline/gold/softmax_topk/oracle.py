"""Softmax and top-k in float64 NumPy, one whole row at a time: the answers to compare with.

N rows, V logits each. Ranking: larger logit first, then the lower index; −0 equals +0.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trapline.gold.errors import RangeError

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Ranked(NamedTuple):
    """The k largest of each row."""

    probs: F64  # (N, K)
    log_probs: F64  # (N, K)
    indices: I64  # (N, K)
    lse: F64  # (N,) natural log of Σ exp(logit / temperature)


def softmax_topk(logits: ArrayLike, k: int, temperature: ArrayLike = 1.0) -> Ranked:
    """The k largest logits of each row, with their probabilities over all V.

    The temperature is one number, or one for each row (N,).
    """
    wide = np.asarray(logits, dtype=np.float64)
    refuse_rows_without_a_softmax(wide)
    indices = rank(wide)[:, :k]
    row_max = np.max(wide, axis=1, keepdims=True, initial=-np.inf)  # (N, 1)
    each = np.broadcast_to(np.asarray(temperature, np.float64), len(wide))[:, None]  # (N, 1)
    # Subtract before dividing: the scaled logits may overflow, their differences only underflow.
    with np.errstate(over="ignore"):
        scaled = (wide - row_max) / each  # (N, V)
    log_sum = np.log(np.sum(np.exp(scaled), axis=1, keepdims=True))  # (N, 1)
    log_probs = np.take_along_axis(scaled, indices, axis=1) - log_sum
    lse = (row_max / each + log_sum)[:, 0]
    return Ranked(np.exp(log_probs), log_probs, indices, lse)


def rank(wide: F64) -> I64:
    """All indices of each row, best first. A stable sort leaves equal logits in index order."""
    return np.argsort(-wide, axis=1, kind="stable").astype(np.int64)


def refuse_rows_without_a_softmax(wide: F64) -> None:
    """A row with NaN or +inf, or with nothing but −inf, has no probabilities."""
    if not np.any(np.isnan(wide) | np.isposinf(wide)) and not np.isneginf(wide).all(axis=1).any():
        return
    for row, values in enumerate(wide):
        if np.isnan(values).any():
            raise RangeError(f"row {row} of logits contains NaN")
        if np.isposinf(values).any():
            raise RangeError(f"row {row} of logits contains +inf")
        if np.isneginf(values).all():
            raise RangeError(f"row {row} of logits is all -inf")
