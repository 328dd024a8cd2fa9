"""Attention by tiles."""

import numpy as np


def flash_attention_fwd(Q, K, V, tile_size, causal=True):
    B, H, N, D = Q.shape
    out = np.zeros_like(Q)
    for i in range(0, N, tile_size):
        q = Q[:, :, i : i + tile_size] / np.sqrt(D)
        m = np.full(q.shape[:3] + (1,), -np.inf)
        total, acc = np.zeros_like(m), np.zeros(q.shape)
        for j in range(0, N, tile_size):
            if causal and j > i + tile_size - 1:
                break
            k, v = K[:, :, j : j + tile_size], V[:, :, j : j + tile_size]
            s = q @ k.transpose(0, 1, 3, 2)
            if causal:
                seen = np.arange(j, j + k.shape[2]) <= np.arange(i, i + q.shape[2])[:, None]
                s = np.where(seen, s, -np.inf)
            new = np.maximum(m, s.max(-1, keepdims=True))
            p, shrink = np.exp(s - new), np.exp(m - new)
            total, acc, m = total * shrink + p.sum(-1, keepdims=True), acc * shrink + p @ v, new
        out[:, :, i : i + tile_size] = acc / total
    return out
