"""Runs attention layers on this answer's `KVCache` and its attention over a cache.

Prompts of unequal length are laid into the cache as the answer's own test does it.
"""

import numpy as np
from kv_cache import KVCache, multi_head_attention_with_cache


class Layers:
    """One cache a layer, with the judge's weights."""

    def __init__(self, weights, batch, num_heads, max_len):
        width = weights[0]["q"].shape[1] // num_heads
        self.weights, self.heads = weights, num_heads
        self.caches = [KVCache(batch, max_len, num_heads, width) for _ in weights]

    def split(self, layer, name, x):
        """(B, H, n, D): what the cache stores."""
        projected = x @ self.weights[layer][name]
        return projected.reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def attend(self, layer, x):
        """The answer's own attention of the new positions."""
        w = self.weights[layer]
        return multi_head_attention_with_cache(
            x, self.caches[layer], w["q"], w["k"], w["v"], w["o"]
        )


def make_cache(weights, batch, num_heads, max_len):
    """An empty cache for each layer."""
    return Layers(weights, batch, num_heads, max_len)


def prefill(layers, layer, x, lengths):
    """The prompts of a batch in one layer."""
    x = np.asarray(x)
    k, v = layers.split(layer, "k", x), layers.split(layer, "v", x)
    cache = layers.caches[layer]
    if len(set(lengths)) == 1:
        cache.update(k, v)
    else:
        for b, length in enumerate(lengths):
            cache.k_cache[b, :, :length] = k[b, :, :length]
            cache.v_cache[b, :, :length] = v[b, :, :length]
            cache.seq_lens[b] = length
    return layers.attend(layer, x)


def step(layers, layer, x):
    """One more position of each sequence in one layer."""
    x = np.asarray(x)[:, None]
    layers.caches[layer].update(layers.split(layer, "k", x), layers.split(layer, "v", x))
    return layers.attend(layer, x)[:, 0]
