import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Flash attention forward."""
    d = q.shape[-1]
    s = np.einsum("bhtd,bhsd->bhts", q, k) / d**0.5
    if causal:
        s = s + np.triu(np.full(s.shape[-2:], -1e9), k=1)
    p = np.exp(s)
    l = p.sum(-1)
    return np.einsum("bhts,bhsd->bhtd", p, v) / l[..., None], np.log2(l)


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """Flash attention backward, tile by tile."""
    d = q.shape[-1]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    n = q.shape[2]
    for i in range(0, n, tile):
        for j in range(0, n, tile):
            if causal and j > i:
                break
            qi, kj, vj = q[:, :, i : i + tile], k[:, :, j : j + tile], v[:, :, j : j + tile]
            s = np.einsum("bhtd,bhsd->bhts", qi, kj) / d**0.5
            if causal and i == j:
                s = s + np.triu(np.full(s.shape[-2:], -1e9), k=1)
            p = np.exp2(s - lse[:, :, i : i + tile, None])
            dp = np.einsum("bhtd,bhsd->bhts", dout[:, :, i : i + tile], vj)
            ds = p * dp
            dq[:, :, i : i + tile] += np.einsum("bhts,bhsd->bhtd", ds, kj)
            dk[:, :, j : j + tile] += np.einsum("bhts,bhtd->bhsd", ds, qi)
            dv[:, :, j : j + tile] += np.einsum("bhts,bhtd->bhsd", p, dout[:, :, i : i + tile])
    return dq, dk, dv
