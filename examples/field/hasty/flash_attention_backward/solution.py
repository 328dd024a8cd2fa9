import numpy as np


def weights(q, k, causal):
    T, S = q.shape[2], k.shape[2]
    s = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(q.shape[3])
    if causal:
        s = np.where(np.tril(np.ones((T, S)), k=S - T) == 0, -np.inf, s)
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)
    return p / l, (m + np.log(l))[..., 0]


def flash_attention(q, k, v, *, causal=False, tile=64):
    r = q.shape[1] // k.shape[1]
    p, lse = weights(q, np.repeat(k, r, axis=1), causal)
    out = np.einsum("bhts,bhsd->bhtd", p, np.repeat(v, r, axis=1))
    return out.astype(q.dtype), lse.astype(q.dtype)


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    r = H // G
    kk, vv = np.repeat(k, r, axis=1), np.repeat(v, r, axis=1)
    p, _ = weights(q, kk, causal)
    dp = np.einsum("bhtd,bhsd->bhts", dout, vv)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / np.sqrt(D)
    dq = np.einsum("bhts,bhsd->bhtd", ds, kk)
    dk = np.einsum("bhts,bhtd->bhsd", ds, q).reshape(B, G, r, S, D).sum(axis=2)
    dv = np.einsum("bhts,bhtd->bhsd", p, dout).reshape(B, G, r, S, D).sum(axis=2)
    return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)
