"""Attention in float64, with what the law of tolerance needs beside it."""

from typing import NamedTuple

import numpy as np

F64 = np.ndarray


class Attention(NamedTuple):
    out: F64  # (B, H, T, D)
    lse: F64  # (B, H, T)
    #: The weights' sum of |v|: what rounding is relative to.
    size: F64  # (B, H, T, D)
    #: The largest |scaled score| that a query sees, at least 1.
    steepness: F64  # (B, H, T)
    weights: F64  # (B, H, T, S)


def attention(q: F64, k: F64, v: F64, causal: bool) -> Attention:
    q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
    heads = q.shape[1] // max(k.shape[1], 1)
    k, v = np.repeat(k, heads, axis=1), np.repeat(v, heads, axis=1)
    T, S, D = q.shape[2], k.shape[2], q.shape[3]
    scores = np.einsum("bhtd,bhsd->bhts", q, k) * D**-0.5
    seen = np.ones((T, S), bool)
    if causal:
        seen = np.arange(S) <= np.arange(T)[:, None] + S - T
    steepness = np.maximum(np.where(seen, np.abs(scores), 0.0).max(axis=3, initial=0.0), 1.0)
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(axis=3, initial=-np.inf)
    base = np.where(np.isneginf(largest), 0.0, largest)
    weights = np.exp(scores - base[..., None])
    total = weights.sum(axis=3)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, base + np.log(total), -np.inf)
    weights = weights / np.where(total > 0, total, 1.0)[..., None]
    out = np.einsum("bhts,bhsd->bhtd", weights, v)
    size = np.einsum("bhts,bhsd->bhtd", weights, np.abs(v))
    return Attention(out, lse, size, steepness, weights)
