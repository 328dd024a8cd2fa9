"""Flash attention, forward and backward, one head at a time. The contract is in prompt.md."""

import operator
from collections.abc import Iterator

import numpy as np


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v, tile = _checked_inputs(q, k, v, tile)
    out = np.zeros(q.shape, dtype=q.dtype)
    lse = np.full(q.shape[:3], -np.inf, dtype=q.dtype)
    for b, h, g in _heads(q, k):
        _head_forward(q[b, h], k[b, g], v[b, g], out[b, h], lse[b, h], causal=causal, tile=tile)
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
    q, k, v, tile = _checked_inputs(q, k, v, tile)
    dout = _checked_array("dout", dout, q.shape)
    out = _checked_array("out", out, q.shape)
    lse = _checked_array("lse", lse, q.shape[:3])
    dq = np.zeros(q.shape, dtype=q.dtype)
    dk = np.zeros(k.shape, dtype=q.dtype)
    dv = np.zeros(v.shape, dtype=q.dtype)
    for b, h, g in _heads(q, k):
        _head_backward(
            (dout[b, h], q[b, h], k[b, g], v[b, g], out[b, h], lse[b, h]),
            (dq[b, h], dk[b, g], dv[b, g]),
            causal=causal,
            tile=tile,
        )
    return dq, dk, dv


# --- one head: matrices (T, D) and (S, D) ---------------------------------------------------------


def _head_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    causal: bool,
    tile: int,
) -> None:
    """Write one head's out and lse; rows that see no key are left as they are."""
    queries, keys = len(q), len(k)
    scale = _scale(q)
    for rows in _spans(_first_seeing(queries, keys, causal), queries, tile):
        q_rows = q[rows] * scale
        peak = np.full(len(q_rows), -np.inf, dtype=q.dtype)
        total = np.zeros(len(q_rows), dtype=q.dtype)
        mixed = np.zeros(q_rows.shape, dtype=q.dtype)
        for cols in _spans(0, _keys_seen(rows, queries, keys, causal), tile):
            scores = q_rows @ k[cols].T
            hidden = _hidden(rows, cols, keys - queries) if causal else None
            if hidden is not None:
                scores[hidden] = -np.inf
            # Every row sees key 0, hence the peak is finite from the first tile on.
            new_peak = np.maximum(peak, scores.max(axis=1))
            weights = np.exp(scores - new_peak[:, None])
            shrink = np.exp(peak - new_peak)
            total = total * shrink + weights.sum(axis=1)
            mixed = mixed * shrink[:, None] + weights @ v[cols]
            peak = new_peak
        out[rows] = mixed / total[:, None]
        lse[rows] = peak + np.log(total)


def _head_backward(
    saved: tuple[np.ndarray, ...],
    gradients: tuple[np.ndarray, ...],
    *,
    causal: bool,
    tile: int,
) -> None:
    """Write one head's dq and add its share to dk and dv."""
    dout, q, k, v, out, lse = saved
    dq, dk, dv = gradients
    queries, keys = len(q), len(k)
    scale = _scale(q)
    for rows in _spans(_first_seeing(queries, keys, causal), queries, tile):
        q_rows = q[rows] * scale
        dout_rows = dout[rows]
        delta = np.sum(dout_rows * out[rows], axis=1)
        dq_rows = np.zeros(q_rows.shape, dtype=q.dtype)
        for cols in _spans(0, _keys_seen(rows, queries, keys, causal), tile):
            exponents = q_rows @ k[cols].T - lse[rows, None]
            # A score exceeds its row's log-sum-exp by rounding only.
            probs = np.exp(np.minimum(exponents, 0))
            hidden = _hidden(rows, cols, keys - queries) if causal else None
            if hidden is not None:
                probs[hidden] = 0
            dv[cols] += probs.T @ dout_rows
            dscores = probs * (dout_rows @ v[cols].T - delta[:, None])
            dk[cols] += dscores.T @ q_rows
            dq_rows += dscores @ k[cols]
        dq[rows] = dq_rows * scale


# --- who sees what --------------------------------------------------------------------------------


def _scale(q: np.ndarray) -> float:
    """What the products of queries and keys are multiplied by."""
    return q.shape[-1] ** -0.5


def _spans(start: int, stop: int, tile: int) -> Iterator[slice]:
    """Slices of at most `tile` that cover start..stop."""
    for begin in range(start, stop, tile):
        yield slice(begin, min(begin + tile, stop))


def _heads(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """All (batch, query head, its key/value head)."""
    batch, heads = q.shape[:2]
    per_group = heads // k.shape[1]
    for b in range(batch):
        for h in range(heads):
            yield b, h, h // per_group


def _first_seeing(queries: int, keys: int, causal: bool) -> int:
    """The first query that sees a key; `queries` if none does."""
    if keys == 0:
        return queries
    return max(0, queries - keys) if causal else 0


def _keys_seen(rows: slice, queries: int, keys: int, causal: bool) -> int:
    """How many keys the last query of `rows` sees."""
    return rows.stop + keys - queries if causal else keys


def _hidden(rows: slice, cols: slice, shift: int) -> np.ndarray | None:
    """Which keys of a tile are later than a query sees (query t sees j <= t + shift), or None."""
    seen_by_first_row = rows.start + shift + 1
    if cols.stop <= seen_by_first_row:
        return None
    last_seen = np.arange(rows.start, rows.stop) + shift
    return np.arange(cols.start, cols.stop) > last_seen[:, None]


# --- refusals -------------------------------------------------------------------------------------


def _checked_inputs(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The arguments that both functions share, as arrays and an int."""
    q = _checked_array("q", q)
    batch, heads, _, width = q.shape
    k = _checked_array("k", k)
    groups, keys = k.shape[1:3]
    if k.shape != (batch, groups, keys, width):
        raise ValueError(f"k of shape {k.shape} does not fit q of shape {q.shape}")
    v = _checked_array("v", v, k.shape)
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key/value heads")
    tile = operator.index(tile)
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")
    return q, k, v, tile


def _checked_array(
    name: str, array: np.ndarray, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """The array, if it is a float one of the given shape (by default: of any four axes)."""
    array = np.asarray(array)
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} must be float32 or float64, not {array.dtype}")
    if shape is None and array.ndim != 4:
        raise ValueError(f"{name} must have 4 axes, not {array.ndim}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")
    return array
