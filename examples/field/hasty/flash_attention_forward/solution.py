import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    k = np.repeat(k, H // G, axis=1)
    v = np.repeat(v, H // G, axis=1)
    s = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(D)
    if causal:
        mask = np.tril(np.ones((T, S)), k=S - T)
        s = np.where(mask == 0, -np.inf, s)
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)
    out = np.einsum("bhts,bhsd->bhtd", p / l, v)
    lse = m[..., 0] + np.log(l[..., 0])
    return out.astype(q.dtype), lse.astype(q.dtype)
