"""A cache of keys and values for attention layers, one list a layer and a sequence."""

from dataclasses import dataclass, field

import numpy as np

Weights = dict[str, np.ndarray]


@dataclass
class Cache:
    """Keys and values (positions, H, D) of each layer and sequence."""

    weights: list[Weights]
    num_heads: int
    max_len: int
    keys: list[list[np.ndarray]] = field(default_factory=list)
    values: list[list[np.ndarray]] = field(default_factory=list)


def make_cache(weights: list[Weights], batch: int, num_heads: int, max_len: int) -> Cache:
    """An empty cache for `batch` sequences of at most `max_len` positions."""
    cache = Cache(weights, num_heads, max_len)
    width = weights[0]["q"].shape[1] // num_heads
    for _ in weights:
        cache.keys.append([np.zeros((0, num_heads, width)) for _ in range(batch)])
        cache.values.append([np.zeros((0, num_heads, width)) for _ in range(batch)])
    return cache


def prefill(cache: Cache, layer: int, x: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Appends the first lengths[b] rows of x (B, n, d); their attention, zeros behind."""
    out = np.zeros(x.shape)
    for b, length in enumerate(lengths):
        out[b, :length] = _attend(cache, layer, b, x[b, :length])
    return out


def step(cache: Cache, layer: int, x: np.ndarray) -> np.ndarray:
    """Appends one position of each sequence, x (B, d); its attention."""
    return np.stack([_attend(cache, layer, b, row[None])[0] for b, row in enumerate(x)])


def _attend(cache: Cache, layer: int, b: int, x: np.ndarray) -> np.ndarray:
    """Appends the rows x (n, d) of one sequence, and attends to all that precedes each."""
    w, heads = cache.weights[layer], cache.num_heads
    q, k, v = ((x @ w[name]).reshape(len(x), heads, -1) for name in "qkv")
    cache.keys[layer][b] = np.concatenate([cache.keys[layer][b], k])
    cache.values[layer][b] = np.concatenate([cache.values[layer][b], v])
    keys, values = cache.keys[layer][b], cache.values[layer][b]
    if len(keys) > cache.max_len:
        raise ValueError(f"{len(keys)} positions do not fit into {cache.max_len}")
    scores = np.einsum("nhd,shd->hns", q, keys) * q.shape[2] ** -0.5
    position = np.arange(len(keys) - len(x), len(keys))
    scores = np.where(np.arange(len(keys)) > position[:, None], -np.inf, scores)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("hns,shd->nhd", shares, values).reshape(len(x), -1) @ w["o"]
