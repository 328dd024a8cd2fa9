"""Paged KV cache (work in progress)."""

import numpy as np


class KVCacheBlock:
    def __init__(self, layer_idx=-1):
        self.layer_idx = layer_idx  # placeholder, assigned later
        self.k = None
        self.v = None


class Cache:
    def __init__(self, num_layers, num_kv_heads, head_dim, block_size, num_blocks):
        self.keys = np.zeros((num_layers, 1, num_blocks * block_size, num_kv_heads, head_dim))
        self.values = np.zeros_like(self.keys)
        self.pos = 0

    def add(self):
        return 0

    def append(self, seq, layer, k, v):
        # decode step: one token
        self.keys[layer, seq, self.pos] = k[0]
        self.values[layer, seq, self.pos] = v[0]
        self.pos += 1

    def view(self, seq, layer):
        return self.keys[layer, seq, : self.pos], self.values[layer, seq, : self.pos]

    def attend(self, seq, layer, q):
        k, v = self.view(seq, layer)
        scores = np.einsum("nhd,shd->hns", q, k)
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        return np.einsum("hns,shd->nhd", weights, v)

    def fork(self, seq):
        return seq

    def truncate(self, seq, n):
        self.pos = n

    def free(self, seq):
        self.pos = 0

    def length(self, seq):
        return self.pos

    def nbytes(self):
        return self.keys.nbytes


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    return Cache(num_layers, num_kv_heads, head_dim, block_size, num_blocks)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    out = []
    for start in range(0, len(k), chunk):
        cache.append(seq, layer, k[start : start + chunk], v[start : start + chunk])
        simulated = np.random.randn(*q[start : start + chunk].shape)
        out.append(cache.attend(seq, layer, simulated))
    return np.concatenate(out)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    per_token = spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"] * spec["bits"]
    return gpu_bytes / per_token, {}
