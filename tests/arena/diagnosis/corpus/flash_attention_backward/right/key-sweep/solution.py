"""Flash attention, forward and backward, head by head.

The forward pass keeps a tile of queries and walks along the keys. The backward pass sweeps the other way:
it keeps a tile of keys and walks down the queries that see it, so that one sweep gives dk, dv and dq.
All arrays are handled as flat lists of heads: query head n of B*H reads key/value head n // (H/G) of B*G.
"""

from collections.abc import Iterator

import numpy as np


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _check_inputs(q, k, v, tile)
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)

    q_heads, k_heads, v_heads, out_heads, lse_heads = map(_heads, (q, k, v, out, lse))
    with np.errstate(over="ignore", under="ignore"):
        for head in range(len(q_heads)):
            kv = head // group
            for rows in _tiles(q.shape[2], tile):
                attended = _attend(q_heads[head], k_heads[kv], v_heads[kv], rows, causal, tile)
                out_heads[head, rows], lse_heads[head, rows] = attended
    return out, lse


def flash_attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    causal: bool = False,
    tile: int = 64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients dq (B,H,T,D), dk and dv (B,G,S,D) of flash_attention's out along dout."""
    dout, q, k, v, out, lse = map(np.asarray, (dout, q, k, v, out, lse))
    _check_inputs(q, k, v, tile)
    _check_results(q, dout, out, lse)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[3] ** -0.5
    dq = np.zeros(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)

    dout_heads, q_heads, k_heads, v_heads, out_heads, lse_heads = map(_heads, (dout, q, k, v, out, lse))
    dq_heads, dk_heads, dv_heads = map(_heads, (dq, dk, dv))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for head in range(len(q_heads)):
            kv = head // group
            head_inputs = (dout_heads[head], q_heads[head] * scale, lse_heads[head])
            delta = np.sum(dout_heads[head] * out_heads[head], axis=-1)
            for cols in _tiles(k.shape[2], tile):
                k_tile, v_tile = k_heads[kv, cols], v_heads[kv, cols]
                for rows in _rows_that_see(cols, q.shape[2], k.shape[2], causal, tile):
                    dout_tile, q_tile, lse_tile = (array[rows] for array in head_inputs)
                    hidden = _hidden(rows, cols, q.shape[2], k.shape[2], causal)
                    weights = _weights(q_tile @ k_tile.T, lse_tile, hidden)
                    dscores = _dscores(weights, dout_tile @ v_tile.T, delta[rows], hidden)
                    dv_heads[kv, cols] += weights.T @ dout_tile
                    dk_heads[kv, cols] += dscores.T @ q_tile
                    dq_heads[head, rows] += dscores @ k_tile
            dq_heads[head] *= scale
    return dq, dk, dv


def _attend(
    q_head: np.ndarray, k_head: np.ndarray, v_head: np.ndarray, rows: slice, causal: bool, tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of the queries `rows` of one head, by the online softmax."""
    queries, keys = len(q_head), len(k_head)
    q_tile = q_head[rows] * q_head.shape[1] ** -0.5
    peak = np.full(len(q_tile), -np.inf, q_tile.dtype)
    mass = np.zeros_like(peak)
    value = np.zeros(q_tile.shape, q_tile.dtype)
    seen = min(rows.stop + keys - queries, keys) if causal else keys
    for cols in _tiles(seen, tile):
        scores = q_tile @ k_head[cols].T
        hidden = _hidden(rows, cols, queries, keys, causal)
        scores[hidden] = -np.inf
        new_peak = np.maximum(peak, scores.max(axis=1))
        base = np.where(np.isneginf(new_peak), 0, new_peak).astype(peak.dtype)
        weights = np.exp(scores - base[:, None])
        weights[hidden] = 0
        shrink = np.exp(peak - base)
        mass = mass * shrink + weights.sum(axis=1)
        value = value * shrink[:, None] + weights @ v_head[cols]
        peak = new_peak
    sees = mass > 0
    mass[~sees] = 1
    peak[~sees] = -np.inf
    return value / mass[:, None], peak + np.log(mass)


def _weights(scores: np.ndarray, lse_tile: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Softmax weights from scaled scores and the saved log-sum-exp.

    A score is never above the log-sum-exp, except by rounding, which in float32 can be 65536 at scores of 1e12.
    """
    weights = np.exp(np.minimum(scores - lse_tile[:, None], 0))
    weights[hidden] = 0
    return weights


def _dscores(weights: np.ndarray, dweights: np.ndarray, delta: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Gradient of the scaled scores. What is hidden counts as 0 even where its product overflowed."""
    dscores = weights * (dweights - delta[:, None])
    dscores[hidden] = 0
    return dscores


def _hidden(rows: slice, cols: slice, queries: int, keys: int, causal: bool) -> np.ndarray:
    """Which of these keys (axis 1) are hidden from which of these queries (axis 0)."""
    if not causal:
        return np.zeros((rows.stop - rows.start, cols.stop - cols.start), bool)
    last_seen = np.arange(rows.start, rows.stop) + (keys - queries)
    return np.arange(cols.start, cols.stop) > last_seen[:, None]


def _rows_that_see(cols: slice, queries: int, keys: int, causal: bool, tile: int) -> Iterator[slice]:
    """The tiles of queries from the first one that sees a key of `cols`."""
    first = max(0, cols.start - (keys - queries)) if causal else 0
    for start in range(first // tile * tile, queries, tile):
        yield slice(start, min(start + tile, queries))


def _tiles(stop: int, tile: int) -> Iterator[slice]:
    """Consecutive slices of at most `tile` that cover 0 to `stop`."""
    for start in range(0, stop, tile):
        yield slice(start, min(start + tile, stop))


def _heads(array: np.ndarray) -> np.ndarray:
    """(B,H,...) as (B*H,...): a view if the array is contiguous, otherwise a copy."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _check_inputs(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Refuse queries, keys, values and tile sizes that the contract refuses."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        _check_float(name, array)
        if array.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} must have one shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and width")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} groups")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def _check_results(q: np.ndarray, dout: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
    """Refuse a gradient or saved results that do not belong to the queries."""
    for name, array, shape in (("dout", dout, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:3])):
        _check_float(name, array)
        if array.shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")


def _check_float(name: str, array: np.ndarray) -> None:
    """Refuse integers, complex numbers and everything else that is not a real float."""
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must be of a real float dtype, not {array.dtype}")
