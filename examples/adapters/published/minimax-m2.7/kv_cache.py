"""Runs attention layers on this answer's `FlatKVCache` and its `MultiHeadAttention`.

The flat cache is the kindest choice: the answer's stack of blocks keeps the last call's keys alone.
"""

import numpy as np
from kv_cache import CacheConfig, FlatKVCache, MultiHeadAttention


class Layers:
    """The answer's layers with the judge's weights, and one cache."""

    def __init__(self, weights, batch, num_heads, max_len):
        width = weights[0]["q"].shape[1]
        config = CacheConfig(
            num_layers=len(weights),
            num_heads=num_heads,
            head_dim=width // num_heads,
            max_seq_len=max_len,
            max_batch_size=batch,
        )
        self.cache = FlatKVCache(config)
        self.layers = [MultiHeadAttention(width, num_heads, width // num_heads) for _ in weights]
        for layer, w in zip(self.layers, weights, strict=True):
            layer.W_q, layer.W_k, layer.W_v, layer.W_o = (w[name] for name in "qkvo")

    def run(self, layer, b, x):
        """New positions x (n, d) of one sequence: attention, then the cache is updated."""
        length = int(self.cache.seq_lengths[layer, b])
        kept = [part.transpose(1, 0, 2)[None] for part in self.cache.get_full_kv(layer, b)]
        known = {layer: tuple(kept)} if length else None
        out, (k, v) = self.layers[layer].forward(x[None], known, layer)
        for n in range(x.shape[0]):
            self.cache.update(layer, b, length + n, k[0, :, n], v[0, :, n])
        return out[0]


def make_cache(weights, batch, num_heads, max_len):
    """One cache for all layers and sequences."""
    return Layers(weights, batch, num_heads, max_len)


def prefill(layers, layer, x, lengths):
    """The prompts one after another."""
    out = np.zeros(np.shape(x))
    for b, length in enumerate(lengths):
        out[b, :length] = layers.run(layer, b, x[b, :length])
    return out


def step(layers, layer, x):
    """One more position of each sequence."""
    return np.stack([layers.run(layer, b, row[None])[0] for b, row in enumerate(np.asarray(x))])
