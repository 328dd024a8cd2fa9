"""Production-grade FlashAttention: forward and memory-efficient backward with the D-optimisation."""

import math

import numpy as np

NEG_INF = -1e9


def flash_attention(q, k, v, *, causal=False, tile=64):
    """FlashAttention forward. Supports MHA, GQA and MQA."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if heads % groups != 0:
        raise ValueError("heads must be divisible by groups")
    scale = 1.0 / math.sqrt(width)
    k = np.repeat(k, heads // groups, axis=1)
    v = np.repeat(v, heads // groups, axis=1)
    out = np.empty_like(q)
    lse = np.empty((batch, heads, queries), dtype=q.dtype)
    for i in range(0, queries, tile):
        i_end = min(i + tile, queries)
        m = np.full((batch, heads, i_end - i), NEG_INF, dtype=q.dtype)
        l = np.zeros_like(m)
        o = np.zeros((batch, heads, i_end - i, width), dtype=q.dtype)
        for j in range(0, keys, tile):
            j_end = min(j + tile, keys)
            if causal and j > i_end - 1:
                break
            s = np.einsum("bhtd,bhsd->bhts", q[:, :, i:i_end], k[:, :, j:j_end]) * scale
            if causal:
                s = np.where(np.arange(j, j_end)[None, :] > np.arange(i, i_end)[:, None], NEG_INF, s)
            m_new = np.maximum(m, s.max(axis=-1))
            correction = np.exp(m - m_new)
            p = np.exp(s - m_new[..., None])
            l = l * correction + p.sum(axis=-1)
            o = o * correction[..., None] + np.einsum("bhts,bhsd->bhtd", p, v[:, :, j:j_end])
            m = m_new
        out[:, :, i:i_end] = o / l[..., None]
        lse[:, :, i:i_end] = m + np.log(l)
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """FlashAttention backward with D = rowsum(dO * O)."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    share = heads // groups
    scale = 1.0 / math.sqrt(width)
    wide_k = np.repeat(k, share, axis=1)
    wide_v = np.repeat(v, share, axis=1)
    d = np.sum(dout * out, axis=-1)
    dq = np.zeros_like(q)
    dk = np.zeros_like(wide_k)
    dv = np.zeros_like(wide_v)
    for j in range(0, keys, tile):
        j_end = min(j + tile, keys)
        for i in range(0, queries, tile):
            i_end = min(i + tile, queries)
            if causal and j > i_end - 1:
                continue
            s = np.einsum("bhtd,bhsd->bhts", q[:, :, i:i_end], wide_k[:, :, j:j_end]) * scale
            if causal:
                s = np.where(np.arange(j, j_end)[None, :] > np.arange(i, i_end)[:, None], NEG_INF, s)
            p = np.exp(s - lse[:, :, i:i_end, None])
            dp = np.einsum("bhtd,bhsd->bhts", dout[:, :, i:i_end], wide_v[:, :, j:j_end])
            ds = p * (dp - d[:, :, i:i_end, None]) * scale
            dq[:, :, i:i_end] += np.einsum("bhts,bhsd->bhtd", ds, wide_k[:, :, j:j_end])
            dk[:, :, j:j_end] += np.einsum("bhts,bhtd->bhsd", ds, q[:, :, i:i_end])
            dv[:, :, j:j_end] += np.einsum("bhts,bhtd->bhsd", p, dout[:, :, i:i_end])
    # Collapse the expanded heads back to the key/value heads.
    shape = (batch, groups, share, keys, width)
    return dq, dk.reshape(shape).mean(axis=2), dv.reshape(shape).mean(axis=2)
