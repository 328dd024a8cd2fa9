"""Attention in two sweeps over the keys: first the normaliser of every row, then the weights."""

import numpy as np


def validate(q, k, v, tile):
    arrays = [q, k, v]
    if any(np.ndim(a) != 4 for a in arrays):
        raise ValueError("q, k, v need four axes")
    kinds = {np.asarray(a).dtype for a in arrays}
    if len(kinds) != 1 or kinds.pop() not in (np.dtype("f4"), np.dtype("f8")):
        raise TypeError("q, k, v must all be float32 or all float64")
    (b, h, _, d), (bk, g, s, dk) = q.shape, k.shape
    if v.shape != (bk, g, s, dk) or b != bk or d != dk:
        raise ValueError(f"shapes do not fit: {q.shape}, {k.shape}, {v.shape}")
    if g < 1 or h % g != 0:
        raise ValueError(f"{h} query heads over {g} kv heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")


def scores(qt, keys, j0, j1, last):
    """Scaled scores of a query tile against keys j0..j1; hidden ones are -inf.

    last[i] is the last key that row i may see.
    """
    s = qt @ keys[j0:j1].T
    hidden = np.arange(j0, j1)[None, :] > last[:, None]
    if hidden.any():
        np.putmask(s, hidden, -np.inf)
    return s


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    validate(q, k, v, tile)
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    dtype = q.dtype
    out = np.empty((B, H, T, D), dtype)
    lse = np.empty((B, H, T), dtype)
    scale = 1.0 / float(np.sqrt(D))

    old = np.seterr(over="ignore", under="ignore", divide="ignore")
    try:
        for index in np.ndindex(B, H):
            keys = k[index[0], index[1] * G // H]
            values = v[index[0], index[1] * G // H]
            t = 0
            while t < T:
                t_end = min(t + tile, T)
                qt = q[index][t:t_end] * scale
                last = np.full(t_end - t, S - 1)
                if causal:
                    last = np.arange(t, t_end) + (S - T)
                stop = max(0, min(S, int(last.max()) + 1))

                # sweep 1: maximum and sum of exponentials
                top = np.full(t_end - t, -np.inf, dtype)
                total = np.zeros(t_end - t, dtype)
                for j in range(0, stop, tile):
                    s = scores(qt, keys, j, min(j + tile, stop), last)
                    new_top = np.maximum(top, s.max(axis=1))
                    pivot = np.where(new_top == -np.inf, dtype.type(0), new_top)
                    total *= np.exp(top - pivot)
                    total += np.exp(s - pivot[:, None]).sum(axis=1)
                    top = new_top

                seen = total > 0
                pivot = np.where(seen, top, dtype.type(0))
                share = np.where(seen, total, dtype.type(1))
                lse[index][t:t_end] = np.where(seen, pivot + np.log(share), -np.inf)

                # sweep 2: weighted values
                mixed = np.zeros((t_end - t, D), dtype)
                for j in range(0, stop, tile):
                    j_end = min(j + tile, stop)
                    s = scores(qt, keys, j, j_end, last)
                    weights = np.exp(s - pivot[:, None]) / share[:, None]
                    mixed += weights @ values[j:j_end]
                out[index][t:t_end] = mixed
                t = t_end
    finally:
        np.seterr(**old)
    return out, lse
