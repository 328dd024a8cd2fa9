"""Flash attention, forward and backward, one group of query heads at a time.

The R query heads that share a key/value head are folded into the rows of one matrix, so that the sum
over the group in dk and dv is part of a matrix product. The forward pass keeps the running weighted
mean of the values, not their weighted sum, and is therefore normalised after every tile.
"""

from collections.abc import Iterator

import numpy as np


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> None:
    """Refuse what the contract calls bad input."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} has {array.ndim} axes instead of 4")
        _check_float(name, array)
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def _check_float(name: str, array: np.ndarray) -> None:
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} has dtype {array.dtype}, not a real float")


def _groups(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[tuple[int, slice], tuple[int, int]]]:
    """For each batch entry and key/value head: the index of its query heads, and its own index."""
    groups = k.shape[1]
    share = q.shape[1] // groups
    for entry in range(q.shape[0]):
        for group in range(groups):
            yield (entry, slice(group * share, (group + 1) * share)), (entry, group)


def _spans(count: int, tile: int) -> Iterator[slice]:
    for start in range(0, count, tile):
        yield slice(start, min(start + tile, count))


def _visible(
    rows: slice, queries: int, keys: int, causal: bool, tile: int
) -> Iterator[tuple[slice, np.ndarray | None]]:
    """The key tiles that some query of `rows` sees, each with the mask of what is hidden (None: nothing)."""
    shift = keys - queries
    for cols in _spans(keys, tile):
        if not causal or cols.stop - 1 <= rows.start + shift:
            yield cols, None
            continue
        if cols.start > rows.stop - 1 + shift:
            return
        limit = np.arange(rows.start, rows.stop)[:, None] + shift
        yield cols, np.arange(cols.start, cols.stop) > limit


def _fold(array: np.ndarray) -> np.ndarray:
    """(R, rows, n) -> (R * rows, n)."""
    return array.reshape(array.shape[0] * array.shape[1], array.shape[2])


def _times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left (R, rows, n) times right (n, m)."""
    return (_fold(left) @ right).reshape(left.shape[0], left.shape[1], right.shape[1])


def _scores(q: np.ndarray, k: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
    """The scores (R, rows, cols) of scaled queries; -inf where hidden."""
    scores = _times(q, k.T)
    if hidden is not None:
        scores[:, hidden] = -np.inf
    return scores


def _scale(width: int) -> float:
    return max(width, 1) ** -0.5


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    _check(q, k, v, tile)
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(q.shape[:3], q.dtype)
    queries, keys = q.shape[2], k.shape[2]
    with np.errstate(over="ignore", under="ignore"):
        for mine, theirs in _groups(q, k):
            q_group = q[mine] * _scale(q.shape[3])
            k_group, v_group = np.ascontiguousarray(k[theirs]), np.ascontiguousarray(v[theirs])
            for rows in _spans(queries, tile):
                visible = _visible(rows, queries, keys, causal, tile)
                mean, log_sum = _attend(q_group[:, rows], k_group, v_group, visible)
                out[mine][:, rows] = mean
                lse[mine][:, rows] = log_sum
    return out, lse


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: Iterator[tuple[slice, np.ndarray | None]]
) -> tuple[np.ndarray, np.ndarray]:
    """Running weighted mean of the values and log-sum-exp for the scaled queries (R, rows, D) of a tile."""
    peak = np.full((*q.shape[:2], 1), -np.inf, q.dtype)
    total = np.zeros_like(peak)
    safe_total = np.ones_like(peak)
    mean = np.zeros(q.shape, q.dtype)
    for cols, hidden in visible:
        scores = _scores(q, k[cols], hidden)
        new_peak = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        anchor = np.where(new_peak > -np.inf, new_peak, 0)
        weights = np.exp(scores - anchor)
        kept = total * np.exp(peak - anchor)
        peak = new_peak
        total = kept + weights.sum(axis=-1, keepdims=True)
        safe_total = np.where(total > 0, total, 1)
        mean *= kept / safe_total
        mean += _times(weights / safe_total, v[cols])
    return mean, (peak + np.log(safe_total))[..., 0]


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
    dout, q, k, v, out, lse = (np.asarray(array) for array in (dout, q, k, v, out, lse))
    _check(q, k, v, tile)
    for name, array, shape in (("dout", dout, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:3])):
        _check_float(name, array)
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape} instead of {shape}")

    dq = np.empty(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)
    queries, keys = q.shape[2], k.shape[2]
    scale = _scale(q.shape[3])
    with np.errstate(over="ignore", under="ignore"):
        for mine, theirs in _groups(q, k):
            q_group = q[mine] * scale
            k_group, v_group = np.ascontiguousarray(k[theirs]), np.ascontiguousarray(v[theirs])
            # A query without keys: no gradient in, and a finite logarithm, so that exp(-inf - 0) is 0.
            blind = np.isneginf(lse[mine])
            grad = np.array(dout[mine])
            grad[blind] = 0
            log_sum = np.where(blind, 0, lse[mine])[..., None]
            delta = (grad * out[mine]).sum(axis=-1)[..., None]
            for rows in _spans(queries, tile):
                q_rows, grad_rows = q_group[:, rows], grad[:, rows]
                dq_rows = np.zeros_like(q_rows)
                for cols, hidden in _visible(rows, queries, keys, causal, tile):
                    excess = _scores(q_rows, k_group[cols], hidden) - log_sum[:, rows]
                    # No weight exceeds 1, however far the saved logarithm was rounded.
                    weights = np.exp(np.minimum(excess, 0))
                    dweights = _times(grad_rows, v_group[cols].T)
                    dscores = weights * (dweights - delta[:, rows])
                    if hidden is not None:
                        dscores[:, hidden] = 0
                    dv[theirs][cols] += _fold(weights).T @ _fold(grad_rows)
                    dk[theirs][cols] += _fold(dscores).T @ _fold(q_rows)
                    dq_rows += _times(dscores, k_group[cols])
                dq[mine][:, rows] = dq_rows * scale
    return dq, dk, dv
