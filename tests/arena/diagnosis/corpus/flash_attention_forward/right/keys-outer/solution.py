"""Flash attention with the key tiles in the outer loop (the order of the first paper).

The state of all queries of a head is kept in float64: maximum, sum, and unnormalised output.
"""

import numpy as np


def _prepare(q, k, v, tile):
    if tile < 1:
        raise ValueError("tile")
    for x in (q, k, v):
        if len(x.shape) != 4:
            raise ValueError("rank")
        if x.dtype.kind != "f" or x.dtype.itemsize not in (4, 8):
            raise TypeError("dtype")
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise TypeError("dtypes differ")
    nb, nh, nt, nd = q.shape
    ng, ns = k.shape[1:3]
    if k.shape != (nb, ng, ns, nd) or v.shape != (nb, ng, ns, nd):
        raise ValueError("shapes")
    if ng == 0 or nh % ng:
        raise ValueError("heads")
    return nb, nh, ng, nt, ns, nd


def _update(state, rows, s, values):
    """Fold scores s (rows, keys), with -inf for hidden keys, and their values into the state."""
    peak, mass, acc = (part[rows] for part in state)
    new = np.maximum(peak, s.max(axis=1))
    safe = np.where(new == -np.inf, 0.0, new)
    p = np.exp(s - safe[:, None])
    alpha = np.exp(peak - safe)
    mass *= alpha
    mass += p.sum(axis=1)
    acc *= alpha[:, None]
    acc += p @ values
    peak[:] = new


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    nb, nh, ng, nt, ns, nd = _prepare(q, k, v, tile)
    out = np.zeros((nb, nh, nt, nd), dtype=q.dtype)
    lse = np.full((nb, nh, nt), -np.inf, dtype=q.dtype)
    ratio = nh // ng
    first_seen = nt - ns  # query t sees keys 0..t-first_seen

    with np.errstate(under="ignore", over="ignore"):
        for flat in range(nb * nh):
            b, h = divmod(flat, nh)
            q64 = q[b, h].astype(np.float64)
            q64 *= nd**-0.5
            state = (np.full(nt, -np.inf), np.zeros(nt), np.zeros((nt, nd)))
            for j in range(0, ns, tile):
                cols = slice(j, min(j + tile, ns))
                kt = k[b, h // ratio, cols].astype(np.float64)
                vt = v[b, h // ratio, cols].astype(np.float64)
                # queries before this one see nothing of the tile
                begin = max(0, j + first_seen) if causal else 0
                for i in range(begin, nt, tile):
                    rows = slice(i, min(i + tile, nt))
                    s = q64[rows] @ kt.T
                    if causal and cols.stop - 1 > i - first_seen:
                        late = (
                            np.arange(cols.start, cols.stop)
                            > np.arange(i, rows.stop)[:, None] - first_seen
                        )
                        s[late] = -np.inf
                    _update(state, rows, s, vt)
            peak, mass, acc = state
            seen = np.flatnonzero(mass)
            out[b, h, seen] = acc[seen] / mass[seen, None]
            lse[b, h, seen] = peak[seen] + np.log(mass[seen])
    return out, lse
