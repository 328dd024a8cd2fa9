"""Exact attention and its gradients; the tiles meet in turns, as the two halves of a ring that rotates."""

import numpy as np


def _refuse_unfit(q, k, v, tile, like_q=(), per_query=()):
    for array in (q, k, v, *like_q, *per_query):
        if array.dtype.kind != "f":
            raise TypeError(f"real floating point needed, not {array.dtype}")
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError("q, k and v need four axes")
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"shapes {q.shape}, {k.shape}, {v.shape} do not fit")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads")
    if any(array.shape != q.shape for array in like_q):
        raise ValueError("dout and out must have the shape of q")
    if any(array.shape != q.shape[:3] for array in per_query):
        raise ValueError("lse must have the shape (B, H, T)")
    if tile < 1:
        raise ValueError("tile must be at least 1")


def _cut(size, tile):
    return [slice(start, min(size, start + tile)) for start in range(0, size, tile)]


def _meetings(length, span, causal, tile):
    """Every (rows, columns, hidden) with something to see; in turn w row tile a meets column tile a + w."""
    shift = span - length
    row_tiles, column_tiles = _cut(length, tile), _cut(span, tile)
    for turn in range(len(column_tiles)):
        for seat, rows in enumerate(row_tiles):
            columns = column_tiles[(seat + turn) % len(column_tiles)]
            if not causal:
                yield rows, columns, None
                continue
            if columns.start > rows.stop - 1 + shift:
                continue
            hidden = None
            if columns.stop - 1 > rows.start + shift:
                limits = np.arange(rows.start, rows.stop)[:, None] + shift
                hidden = np.arange(columns.start, columns.stop) > limits
            yield rows, columns, hidden


def _by_group(array, groups):
    batch, heads, *rest = array.shape
    return array.reshape(batch, groups, heads // groups, *rest)


def _turned(array):
    return np.swapaxes(array, -1, -2)


def flash_attention(q, k, v, *, causal=False, tile=64):
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _refuse_unfit(q, k, v, tile)
    groups = k.shape[1]
    scale = float(q.shape[3]) ** -0.5
    queries, keys, values = _by_group(q, groups), k[:, :, None], v[:, :, None]
    blend = np.zeros(queries.shape, q.dtype)
    total = np.zeros(queries.shape[:-1] + (1,), q.dtype)
    peak = np.full_like(total, -np.inf)

    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for rows, columns, hidden in _meetings(q.shape[2], k.shape[2], causal, tile):
            scores = (queries[..., rows, :] * scale) @ _turned(keys[..., columns, :])
            if hidden is not None:
                scores[..., hidden] = -np.inf
            before = peak[..., rows, :]
            higher = np.maximum(before, scores.max(axis=-1, keepdims=True))
            base = np.where(np.isneginf(higher), 0, higher)
            fade = np.exp(before - base)
            weights = np.exp(scores - base)
            total[..., rows, :] = total[..., rows, :] * fade + weights.sum(axis=-1, keepdims=True)
            blend[..., rows, :] = blend[..., rows, :] * fade + weights @ values[..., columns, :]
            peak[..., rows, :] = higher
        lse = (peak + np.log(total)).reshape(q.shape[:3])
        out = (blend / np.where(total > 0, total, 1)).reshape(q.shape)
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    dout, q, k, v, out, lse = (np.asarray(array) for array in (dout, q, k, v, out, lse))
    _refuse_unfit(q, k, v, tile, like_q=(dout, out), per_query=(lse,))
    groups, span = k.shape[1:3]
    length = q.shape[2]
    scale = float(q.shape[3]) ** -0.5

    # The first queries may see no key at all: weight exp(s - inf) = 0, and nothing flows in from above.
    blind = length if span == 0 else max(0, length - span) if causal else 0
    level = lse.copy()
    level[:, :, :blind] = np.inf
    inflow = dout.copy()
    inflow[:, :, :blind] = 0
    mean = (inflow * out).sum(axis=-1)

    queries, keys, values = _by_group(q, groups), k[:, :, None], v[:, :, None]
    inflow, level, mean = _by_group(inflow, groups), _by_group(level, groups)[..., None], _by_group(mean, groups)[..., None]
    dq = np.zeros(queries.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)

    with np.errstate(over="ignore", under="ignore"):
        for rows, columns, hidden in _meetings(length, span, causal, tile):
            query, flow = queries[..., rows, :] * scale, inflow[..., rows, :]
            key, value = keys[..., columns, :], values[..., columns, :]
            scores = query @ _turned(key)
            # A weight is at most 1; the saved lse of a huge score may be too low by its rounding.
            weights = np.exp(np.minimum(scores - level[..., rows, :], 0))
            if hidden is not None:
                weights[..., hidden] = 0
            dv[:, :, columns] += (_turned(weights) @ flow).sum(axis=2)
            slope = weights * (flow @ _turned(value) - mean[..., rows, :])
            dq[..., rows, :] += slope @ key * scale
            dk[:, :, columns] += (_turned(slope) @ query).sum(axis=2)
    return dq.reshape(q.shape), dk, dv
