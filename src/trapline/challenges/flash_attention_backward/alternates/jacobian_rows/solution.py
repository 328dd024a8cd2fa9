"""One query at a time: a softmax is a vector, its derivative w ∘ (dw − w·dw), memory O(S)."""

import numpy as np


def _rows(q, k, causal):
    """For each query that sees a key: index, kv head, number of keys, weights, lse."""
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    for b in range(B):
        for h in range(H):
            g = h * G // H
            keys = np.ascontiguousarray(k[b, g])
            for t in range(T):
                n = min(S, t + 1 + S - T) if causal else S
                if n <= 0:
                    continue
                logits = keys[:n] @ q[b, h, t] * q.dtype.type(D**-0.5)
                top = logits.max()
                mass = np.exp(logits - top)
                total = mass.sum()
                yield (b, h, t), g, n, mass / total, top + np.log(total)


def flash_attention(q, k, v, *, causal=False, tile=64):
    """out and lse, query by query; `tile` has nothing to say here."""
    _require(q, k, v, tile)
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    for at, g, n, weights, value in _rows(q, k, causal):
        out[at] = weights @ v[at[0], g, :n]
        lse[at] = value
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """Gradients, query by query, through the softmax's Jacobian."""
    _require(q, k, v, tile)
    _require_like(q, dout, out, lse)
    scale = q.dtype.type(q.shape[3] ** -0.5)
    dq = np.zeros(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)
    for at, g, n, weights, _ in _rows(q, k, causal):
        b = at[0]
        slopes = v[b, g, :n] @ dout[at]
        inner = weights * (slopes - weights @ slopes) * scale
        dq[at] = inner @ k[b, g, :n]
        dk[b, g, :n] += np.multiply.outer(inner, q[at])
        dv[b, g, :n] += np.multiply.outer(weights, dout[at])
    return dq, dk, dv


def _require(q, k, v, tile):
    if {x.dtype.kind for x in (q, k, v)} != {"f"}:
        raise TypeError("floats expected")
    if {x.ndim for x in (q, k, v)} != {4} or k.shape != v.shape:
        raise ValueError("four axes each, and k like v")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError("q and k do not fit")
    if tile < 1:
        raise ValueError("tile must be at least 1")


def _require_like(q, dout, out, lse):
    if {x.dtype.kind for x in (dout, out, lse)} != {"f"}:
        raise TypeError("floats expected")
    if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError("dout, out, lse must fit q")
