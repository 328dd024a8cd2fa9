"""Runs attention layers on this answer's `BatchedKVCache` and its attention for prompts and steps.

With prompts of unequal length the answer's own masks are used: its `lengths` arguments.
"""

import numpy as np
from attention import cached_attention, cached_attention_with_mask, prompt_attention
from kv_cache import BatchedKVCache, CacheConfig


class Layers:
    """A cache with a part for each layer, and the judge's weights."""

    def __init__(self, weights, batch, num_heads, max_len):
        width = weights[0]["q"].shape[1] // num_heads
        config = CacheConfig(
            batch_size=batch,
            num_heads=num_heads,
            head_dim=width,
            max_seq_len=max_len,
            dtype=np.float32,
        )
        self.weights, self.heads, self.scale = weights, num_heads, width**-0.5
        self.caches = BatchedKVCache(len(weights), config).caches
        self.lengths = [None] * len(weights)

    def split(self, layer, name, x):
        """(B, H, n, D)."""
        projected = x @ self.weights[layer][name]
        return projected.reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def join(self, layer, heads):
        """(B, n, d) through the output weights."""
        joined = heads.transpose(0, 2, 1, 3).reshape(heads.shape[0], heads.shape[2], -1)
        return joined @ self.weights[layer]["o"]


def make_cache(weights, batch, num_heads, max_len):
    """An empty cache for each layer."""
    return Layers(weights, batch, num_heads, max_len)


def prefill(layers, layer, x, lengths):
    """The prompts of a batch in one layer; equal ones need no mask of lengths."""
    q, k, v = (layers.split(layer, name, np.asarray(x)) for name in "qkv")
    uneven = len(set(lengths)) > 1
    layers.lengths[layer] = np.array(lengths) if uneven else None
    out, _, _ = prompt_attention(
        q, k, v, layers.caches[layer], layers.scale, lengths=layers.lengths[layer]
    )
    return layers.join(layer, out)


def step(layers, layer, x):
    """One more position of each sequence in one layer."""
    q, k, v = (layers.split(layer, name, np.asarray(x)[:, None]) for name in "qkv")
    cache = layers.caches[layer]
    cache.update(k, v)
    if layers.lengths[layer] is None:
        out = cached_attention(q, cache, layers.scale)
    else:
        layers.lengths[layer] = layers.lengths[layer] + 1
        out = cached_attention_with_mask(q, cache, layers.scale, lengths=layers.lengths[layer])
    return layers.join(layer, out)[:, 0]
