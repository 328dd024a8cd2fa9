"""Flash attention with four nested loops: batch, head, query tile, key tile."""

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and lse (B,H,T)."""
    q, k, v = check(q, k, v, tile)
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    group = H // G
    scale = q.dtype.type(D**-0.5)
    out = np.zeros((B, H, T, D), dtype=q.dtype)
    lse = np.full((B, H, T), -np.inf, dtype=q.dtype)

    with np.errstate(over="ignore", under="ignore"):
        for b in range(B):
            for h in range(H):
                g = h // group
                for t0 in range(first_seeing(T, S, causal), T, tile):
                    t1 = min(t0 + tile, T)
                    qt = q[b, h, t0:t1] * scale
                    top, total = row_statistics(qt, k[b, g], t0, T, causal, tile)
                    acc = np.zeros((t1 - t0, D), dtype=q.dtype)
                    for s0 in range(0, last_seen(t1, T, S, causal), tile):
                        s1 = min(s0 + tile, S)
                        scores = masked_scores(qt, k[b, g, s0:s1], t0, s0, S - T, causal)
                        acc += np.exp(scores - top[:, None]) @ v[b, g, s0:s1]
                    out[b, h, t0:t1] = acc / total[:, None]
                    lse[b, h, t0:t1] = top + np.log(total)
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """Gradients dq (B,H,T,D), dk and dv (B,G,S,D) of a loss with gradient dout at out."""
    q, k, v = check(q, k, v, tile)
    dout, out, lse = check_saved(dout, out, lse, q)
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    group = H // G
    scale = q.dtype.type(D**-0.5)
    dq = np.zeros(q.shape, dtype=q.dtype)
    dk = np.zeros(k.shape, dtype=q.dtype)
    dv = np.zeros(v.shape, dtype=q.dtype)

    with np.errstate(over="ignore", under="ignore"):
        for b in range(B):
            for h in range(H):
                g = h // group
                for t0 in range(first_seeing(T, S, causal), T, tile):
                    t1 = min(t0 + tile, T)
                    qt = q[b, h, t0:t1] * scale
                    dot = dout[b, h, t0:t1]
                    # lse has lost digits where scores are large; the sums are formed again
                    top, total = row_statistics(qt, k[b, g], t0, T, causal, tile)
                    delta = np.sum(dot * out[b, h, t0:t1], axis=1)
                    dqt = np.zeros((t1 - t0, D), dtype=q.dtype)
                    for s0 in range(0, last_seen(t1, T, S, causal), tile):
                        s1 = min(s0 + tile, S)
                        ks, vs = k[b, g, s0:s1], v[b, g, s0:s1]
                        scores = masked_scores(qt, ks, t0, s0, S - T, causal)
                        p = np.exp(scores - top[:, None]) / total[:, None]
                        ds = p * (dot @ vs.T - delta[:, None])
                        dv[b, g, s0:s1] += p.T @ dot
                        dk[b, g, s0:s1] += ds.T @ qt
                        dqt += ds @ ks
                    dq[b, h, t0:t1] = dqt * scale
    return dq, dk, dv


def first_seeing(T, S, causal):
    """The first query that sees a key; T if there is none."""
    if S == 0:
        return T
    return max(0, T - S) if causal else 0


def last_seen(t1, T, S, causal):
    """One more than the last key that any query before t1 sees."""
    return min(S, t1 + S - T) if causal else S


def masked_scores(qt, ks, t0, s0, shift, causal):
    """Scores of a tile; a key j is hidden from query t where j > t + shift."""
    scores = qt @ ks.T
    if causal:
        t = np.arange(t0, t0 + len(qt))
        j = np.arange(s0, s0 + len(ks))
        scores[j[None, :] > t[:, None] + shift] = -np.inf
    return scores


def row_statistics(qt, keys, t0, T, causal, tile):
    """Maximum of every row's scores, and the sum of exp(score - maximum)."""
    S = len(keys)
    top = np.full(len(qt), -np.inf, dtype=qt.dtype)
    total = np.zeros(len(qt), dtype=qt.dtype)
    for s0 in range(0, last_seen(t0 + len(qt), T, S, causal), tile):
        scores = masked_scores(qt, keys[s0 : s0 + tile], t0, s0, S - T, causal)
        higher = np.maximum(top, scores.max(axis=1))
        total = total * np.exp(top - higher) + np.exp(scores - higher[:, None]).sum(axis=1)
        top = higher
    return top, total


def check(q, k, v, tile):
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have four axes")
        if x.dtype.kind != "f":
            raise TypeError(f"{name} must be float32 or float64")
    if k.shape != v.shape:
        raise ValueError("k and v must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError("q and k do not fit each other")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError("the query heads are not a multiple of the key/value heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")
    return q, k, v


def check_saved(dout, out, lse, q):
    dout, out, lse = np.asarray(dout), np.asarray(out), np.asarray(lse)
    if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError("dout, out and lse do not fit q")
    for x in (dout, out, lse):
        if x.dtype.kind != "f":
            raise TypeError("dout, out and lse must be float32 or float64")
    return dout, out, lse
