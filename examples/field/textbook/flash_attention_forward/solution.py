"""Flash attention forward, written the way the papers draw it: one head, one query tile, all key tiles."""

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Tiled attention with online softmax.

    q: (B, H, T, D), k and v: (B, G, S, D). Returns out (B, H, T, D) and lse (B, H, T).
    """
    check_arguments(q, k, v, tile)
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    heads_per_group = heads // groups
    scale = q.dtype.type(1.0 / np.sqrt(width))
    out = np.zeros_like(q, order="C", subok=False)
    lse = np.full((batch, heads, queries), -np.inf, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            k_head = k[b, h // heads_per_group]
            v_head = v[b, h // heads_per_group]
            for i in range(0, queries, tile):
                q_tile = q[b, h, i : i + tile] * scale
                positions = np.arange(i, i + len(q_tile)) + (keys - queries)
                o, l = attend_tile(q_tile, k_head, v_head, positions, causal, tile)
                out[b, h, i : i + tile] = o
                lse[b, h, i : i + tile] = l
    return out, lse


def attend_tile(q_tile, k_head, v_head, positions, causal, tile):
    """Online softmax of one query tile over all key tiles."""
    m = np.full(len(q_tile), -np.inf, dtype=q_tile.dtype)
    l = np.zeros(len(q_tile), dtype=q_tile.dtype)
    acc = np.zeros_like(q_tile)
    for j in range(0, len(k_head), tile):
        s = q_tile @ k_head[j : j + tile].T
        if causal:
            key_positions = np.arange(j, j + s.shape[1])
            s = np.where(key_positions[None, :] <= positions[:, None], s, -np.inf)
            s = s.astype(q_tile.dtype, copy=False)
        m_new = np.maximum(m, s.max(axis=1))
        # Rows that have seen nothing yet: subtract 0 instead of -inf.
        m_safe = np.where(np.isfinite(m_new), m_new, 0).astype(q_tile.dtype)
        p = np.exp(s - m_safe[:, None])
        alpha = np.exp(m - m_safe)  # old sums were relative to m, the smaller maximum
        l = alpha * l + p.sum(axis=1)
        acc = alpha[:, None] * acc + p @ v_head[j : j + tile]
        m = m_new
    empty = l == 0
    l_safe = np.where(empty, 1, l).astype(q_tile.dtype)
    return acc / l_safe[:, None], np.where(empty, -np.inf, m + np.log(l_safe))


def check_arguments(q, k, v, tile):
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} must be a float32 or float64 array")
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, has {array.ndim}")
    if k.shape != v.shape:
        raise ValueError("k and v must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError("q and k must agree in batch and width")
    if q.shape[1] % k.shape[1]:
        raise ValueError("the number of query heads must be a multiple of the number of key heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")
