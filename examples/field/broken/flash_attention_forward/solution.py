import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Flash attention with online softmax."""
    B, H, T, D = q.shape
    S = k.shape[2]
    out = np.zeros((B, H, T, D))
    lse = np.zeros((B, H, T))
    for b in range(B):
        for h in range(H):
            for i in range(T // tile):
                rows = slice(i * tile, (i + 1) * tile)
                m = np.full(tile, -np.inf)
                l = np.zeros(tile)
                o = np.zeros((tile, D))
                for j in range(S // tile):
                    if causal and j > i:
                        break
                    cols = slice(j * tile, (j + 1) * tile)
                    s = q[b, h, rows] @ k[b, h % k.shape[1], cols].T
                    if causal and i == j:
                        s = np.where(np.triu(np.ones((tile, tile)), k=1) > 0, -np.inf, s)
                    m_new = np.maximum(m, s.max(axis=1))
                    correction = np.where(np.isinf(m), 0, np.exp(m_new - np.where(np.isinf(m), m_new, m)))
                    p = np.exp(s - m_new[:, None])
                    l = l * correction + p.sum(axis=1)
                    o = o * correction[:, None] + p @ v[b, h % k.shape[1], cols]
                    m = m_new
                out[b, h, rows] = o / l[:, None]
                lse[b, h, rows] = np.log(l)
    return out, lse
