# ruff: noqa: E501, E741, SIM108
"""Flash attention with einsum; all query heads of one kv head are folded into one long list of rows.

Row r of a group is query r % T of head r // T in the group, so a tile of rows may cross heads.
"""

import numpy as np


def _require(ok, message, error=ValueError):
    if not ok:
        raise error(message)


def _row_tile(q_rows, k, v, limit, tile):
    """(out, lse) of rows (R,D); limit (R,) is the number of keys that each row sees."""
    dtype = q_rows.dtype
    R, D = q_rows.shape
    reach = int(limit.max(initial=0))
    m = np.full((R, 1), -np.inf, dtype)
    l = np.zeros((R, 1), dtype)
    o = np.zeros((R, D), dtype)
    for start in range(0, reach, tile):
        stop = min(start + tile, reach)
        s = np.einsum("rd,sd->rs", q_rows, k[start:stop], optimize=True)
        dead = np.arange(start, stop)[None, :] >= limit[:, None]
        s = np.where(dead, dtype.type(-np.inf), s)
        m_next = np.maximum(m, s.max(axis=1, keepdims=True))
        shift = np.where(np.isinf(m_next), dtype.type(0), m_next)
        p = np.exp(s - shift)
        carried = np.einsum("rx,rx->rx", l, np.exp(m - shift))
        l = carried + np.einsum("rs->r", p)[:, None]
        inverse = np.divide(1, l, out=np.zeros_like(l), where=l > 0)
        o = np.einsum("rd,rx->rd", o, carried * inverse)
        o += np.einsum(
            "rs,sd->rd", np.einsum("rs,rx->rs", p, inverse), v[start:stop], optimize=True
        )
        m = m_next
    lse = np.full(R, -np.inf, dtype)
    seen = l[:, 0] > 0
    lse[seen] = m[seen, 0] + np.log(l[seen, 0])
    return o, lse


def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _require(q.ndim == k.ndim == v.ndim == 4, "q, k, v have 4 axes")
    _require(q.dtype == k.dtype == v.dtype, "q, k, v have one dtype", TypeError)
    _require(q.dtype in (np.float32, np.float64), "float32 or float64", TypeError)
    B, H, T, D = q.shape
    _, G, S, _ = k.shape
    _require(k.shape == v.shape == (B, G, S, D), "shapes do not fit")
    _require(G > 0 and H % G == 0, "H is not a multiple of G")
    _require(tile >= 1, "tile >= 1")

    rep = H // G
    rows = rep * T
    scaled = (q * D**-0.5).reshape(B, G, rows, D)
    out = np.empty((B, G, rows, D), q.dtype)
    lse = np.empty((B, G, rows), q.dtype)
    if causal:
        limit = np.clip(np.arange(T) + 1 + S - T, 0, S)
    else:
        limit = np.full(T, S)
    limit = np.tile(limit, rep)
    with np.errstate(over="ignore", under="ignore"):
        for b in range(B):
            for g in range(G):
                for r in range(0, rows, tile):
                    part = slice(r, min(r + tile, rows))
                    out[b, g, part], lse[b, g, part] = _row_tile(
                        scaled[b, g, part], k[b, g], v[b, g], limit[part], tile
                    )
    return out.reshape(B, H, T, D), lse.reshape(B, H, T)
