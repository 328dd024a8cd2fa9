"""Exact attention: one coroutine per query tile drinks key tiles, newest first, back from its horizon."""

import numpy as np


def _refuse_unfit(q, k, v, tile):
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} needs four axes, not {array.ndim}")
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must be real floating point, not {array.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"q {q.shape} does not fit k {k.shape}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads")
    if tile < 1:
        raise ValueError("tile must be at least 1")


def _walk_back(horizon, step):
    """Slices of at most `step` keys that end at the horizon and go back to key 0."""
    for stop in range(horizon, 0, -step):
        yield slice(max(0, stop - step), stop)


def _drinker(queries):
    """Take (keys, values, hidden) by send; a None ends it and gives back (out, lse)."""
    keys, values, hidden = yield
    scores = queries @ keys
    if hidden is not None:
        scores[..., hidden] = -np.inf
    # The walk starts at the horizon, so every row of the tile sees a key in its first batch.
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    blend = weights @ values
    while (batch := (yield)) is not None:
        keys, values, hidden = batch
        scores = queries @ keys
        if hidden is not None:
            scores[..., hidden] = -np.inf
        higher = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        fade = np.exp(peak - higher)
        weights = np.exp(scores - higher)
        total *= fade
        total += weights.sum(axis=-1, keepdims=True)
        blend *= fade
        blend += weights @ values
        peak = higher
    yield blend / total, (peak + np.log(total))[..., 0]


def _finish(drinker, batches):
    next(drinker)
    for batch in batches:
        drinker.send(batch)
    return drinker.send(None)


def flash_attention(q, k, v, *, causal=False, tile=64):
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _refuse_unfit(q, k, v, tile)
    batch, heads, length, width = q.shape
    groups, span = k.shape[1:3]
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    if out.size == 0 or k.size == 0:
        return out, lse

    shift = span - length
    blind = max(0, -shift) if causal else 0
    scale = float(width) ** -0.5
    split = (batch, groups, heads // groups, length)
    q_groups = q.reshape(*split, width)
    out_groups, lse_groups = out.reshape(*split, width), lse.reshape(split)
    k_turned, v_shared = np.swapaxes(k, 2, 3)[:, :, None], v[:, :, None]

    def batches(start, stop):
        horizon = stop + shift if causal else span
        for keys in _walk_back(horizon, tile):
            hidden = None
            if causal and keys.stop == horizon:
                rows, columns = stop - start, keys.stop - keys.start
                hidden = ~np.tri(rows, columns, columns - rows, dtype=bool)
            yield k_turned[..., keys], v_shared[..., keys, :], hidden

    with np.errstate(over="ignore", under="ignore"):
        for start in range(blind, length, tile):
            stop = min(length, start + tile)
            queries = q_groups[..., start:stop, :] * scale
            result = _finish(_drinker(queries), batches(start, stop))
            out_groups[..., start:stop, :], lse_groups[..., start:stop] = result
    return out, lse
