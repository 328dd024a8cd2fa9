"""Split keys: every tile of keys gives a finished partial attention, and a tree merges the parts.

Computes in float64 whatever comes in, one query row block at a time.
"""

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """(out, lse) with the parts merged two by two, as split-KV decoding kernels do."""
    arrays = [q, k, v]
    if not all(np.issubdtype(x.dtype, np.floating) for x in arrays):
        raise TypeError("floating-point arrays expected")
    if [x.ndim for x in arrays] != [4, 4, 4]:
        raise ValueError("four axes expected")
    B, H, T, D = q.shape
    Bk, G, S, Dk = k.shape
    if k.shape != v.shape or q.shape[::3] != (Bk, Dk):
        raise ValueError(f"shapes {q.shape}, {k.shape}, {v.shape} do not fit")
    if H % G != 0:
        raise ValueError(f"{G} key heads do not divide {H} query heads")
    if not tile >= 1:
        raise ValueError("tile must be at least 1")
    kv_head = np.repeat(np.arange(G), H // G)
    out, lse = np.zeros(q.shape, q.dtype), np.full(q.shape[:3], -np.inf, q.dtype)
    for i in range(0, T, tile):
        positions = np.arange(i, min(i + tile, T)) + S - T
        for b in range(B):
            for h in range(H):
                block = q[b, h, i : i + tile].astype(np.float64) / np.sqrt(D)
                keys, values = k[b, kv_head[h]], v[b, kv_head[h]]
                reach = min(S, positions[-1] + 1) if causal else S
                part = _span(block, keys, values, positions, causal, 0, reach, tile)
                if part is not None:
                    out[b, h, i : i + tile], lse[b, h, i : i + tile] = part
    return out, lse


def _span(block, keys, values, positions, causal, start, stop, tile):
    """Attention to keys start … stop: directly when they fit a tile, otherwise from two halves."""
    if stop <= start:
        return None
    if stop - start <= tile:
        return _leaf(block, keys[start:stop], values[start:stop], positions, causal, start)
    middle = start + (stop - start + 1) // 2
    left = _span(block, keys, values, positions, causal, start, middle, tile)
    right = _span(block, keys, values, positions, causal, middle, stop, tile)
    return _join(left, right)


def _leaf(block, keys, values, positions, causal, start):
    logits = block @ keys.T.astype(np.float64)
    if causal:
        logits = np.where(start + np.arange(len(keys)) <= positions[:, None], logits, -np.inf)
    lse = np.logaddexp.reduce(logits, axis=1)
    weights = np.exp(logits - np.nan_to_num(lse, neginf=0.0)[:, None])
    return weights @ values.astype(np.float64), lse


def _join(left, right):
    """Two disjoint sets of keys: each output counts by its share of the joint mass."""
    lse = np.logaddexp(left[1], right[1])
    base = np.where(lse == -np.inf, 0.0, lse)
    shares = [np.exp(part[1] - base)[:, None] for part in (left, right)]
    return left[0] * shares[0] + right[0] * shares[1], lse
