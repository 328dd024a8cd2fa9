"""Runs attention layers on this answer's `KVCache`, which all layers share, and its attention."""

import numpy as np
from kv_cache import KVCache, MultiHeadAttention


class Layers:
    """The answer's layers with the judge's weights; its matrices act from the left."""

    def __init__(self, weights, batch, num_heads, max_len):
        width = weights[0]["q"].shape[1]
        self.cache = KVCache(len(weights), batch, num_heads, width // num_heads, max_len)
        self.layers = [MultiHeadAttention(width, num_heads, i) for i in range(len(weights))]
        for layer, w in zip(self.layers, weights, strict=True):
            layer.Wq, layer.Wk, layer.Wv, layer.Wo = (w[name].T.tolist() for name in "qkvo")


def make_cache(weights, batch, num_heads, max_len):
    """One cache with a part for each layer."""
    return Layers(weights, batch, num_heads, max_len)


def prefill(layers, layer, x, lengths):
    """The prompts one after another."""
    out = np.zeros(np.shape(x))
    for b, length in enumerate(lengths):
        out[b, :length] = layers.layers[layer].prefill(x[b, :length].tolist(), layers.cache, b)
    return out


def step(layers, layer, x):
    """One more position of each sequence."""
    return np.asarray(layers.layers[layer].decode_step(np.asarray(x).tolist(), layers.cache))
