"""Attention in float64 NumPy: with the whole score matrix, by tiles, and over pages.

Axis letters: B batch, H query heads, G key/value heads, T queries, S keys, D width.
The untiled and the tiled functions share the definition of the mask and nothing else: the untiled
ones follow the textbook, the tiled ones the recurrences of docs/components/attention.md. The tests
compare them.
"""

from collections.abc import Iterator

import numpy as np


def visible(
    queries: np.ndarray, keys: np.ndarray, offset: int, causal: bool, window: int | None
) -> np.ndarray:
    """Which keys each query sees, bool (queries, keys). Query t is at key position t + offset.

    With offset = S − T the last query is at the last key (bottom-right alignment).
    """
    ahead = keys[None, :] - (queries[:, None] + offset)
    seen = np.ones(ahead.shape, dtype=bool)
    if causal:
        seen &= ahead <= 0
    if window is not None:
        seen &= np.abs(ahead) < window
    return seen


# --- untiled ------------------------------------------------------------------------------------


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(out (B,H,T,D), lse (B,H,T)) in float64. A query that sees no key gives 0 and −inf."""
    scores, _ = _scores(q, k, causal, window, softcap, scale)
    weights, lse = _softmax(scores)
    return np.asarray(weights @ _per_query_head(v, q.shape[1])), lse


def attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    dlse: np.ndarray | float = 0.0,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv) in float64, by the chain rule through the softmax's Jacobian.

    `dlse` (B,H,T) is the gradient that comes in through the log-sum-exp.
    """
    heads, groups = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores, slope = _scores(q, k, causal, window, softcap, scale)
    weights, _ = _softmax(scores)
    wide_k, wide_v = _per_query_head(k, heads), _per_query_head(v, heads)
    dout = dout.astype(np.float64)
    dweights = dout @ wide_v.swapaxes(-1, -2)
    # Row by row: (diag(w) − w wᵀ) dw, written without forming the Jacobian.
    dscores = weights * (dweights - np.sum(weights * dweights, axis=-1, keepdims=True))
    # ∂lse/∂score is the weight.
    dscores = dscores + weights * np.asarray(dlse, np.float64)[..., None]
    dlogits = dscores * slope * scale
    dq = dlogits @ wide_k
    dk = dlogits.swapaxes(-1, -2) @ q.astype(np.float64)
    dv = weights.swapaxes(-1, -2) @ dout
    return dq, _sum_over_group(dk, groups), _sum_over_group(dv, groups)


def _scores(
    q: np.ndarray,
    k: np.ndarray,
    causal: bool,
    window: int | None,
    softcap: float,
    scale: float | None,
) -> tuple[np.ndarray, np.ndarray | float]:
    """Masked scores (B,H,T,S) and their slope with respect to the scaled dot product."""
    heads, T, D = q.shape[1:]
    S = k.shape[2]
    scale = D**-0.5 if scale is None else scale
    logits = q.astype(np.float64) @ _per_query_head(k, heads).swapaxes(-1, -2) * scale
    slope: np.ndarray | float = 1.0
    if softcap:
        squashed = np.tanh(logits / softcap)
        logits, slope = softcap * squashed, 1.0 - squashed**2
    seen = visible(np.arange(T), np.arange(S), S - T, causal, window)
    return np.where(seen, logits, -np.inf), slope


def _softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row-wise softmax and log-sum-exp; a row of −inf alone has weights 0 and lse −inf."""
    peak = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    shifted = np.exp(scores - np.where(np.isneginf(peak), 0.0, peak))
    total = np.sum(shifted, axis=-1, keepdims=True)
    empty = total == 0.0
    weights = shifted / np.where(empty, 1.0, total)
    lse = np.where(empty, -np.inf, peak + np.log(np.where(empty, 1.0, total)))
    return weights, lse[..., 0]


def _per_query_head(x: np.ndarray, heads: int) -> np.ndarray:
    """(B,G,S,D) -> (B,H,S,D): query head h reads key/value head h // (H/G)."""
    return np.repeat(x.astype(np.float64), heads // max(x.shape[1], 1), axis=1)


def _sum_over_group(x: np.ndarray, groups: int) -> np.ndarray:
    """(B,H,S,D) -> (B,G,S,D): the sum over the query heads that share a key/value head."""
    B, H, S, D = x.shape
    return np.asarray(x.reshape(B, groups, H // max(groups, 1), S, D).sum(axis=2))


# --- tiled --------------------------------------------------------------------------------------


def attention_tiled(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    tile: int = 64,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`attention`, one (tile × tile) block of scores at a time, with the online softmax."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, lse = np.zeros((B, H, T, D)), np.full((B, H, T), -np.inf)
    for b, h in np.ndindex(B, H):
        g = h * G // H
        for rows in _spans(T, tile):
            state = _Online(len(rows), D)
            for cols in _spans(S, tile):
                logits = q[b, h, rows] * scale @ k[b, g, cols].T
                seen = visible(rows, cols, S - T, causal, window)
                state.add(np.where(seen, _capped(logits, softcap), -np.inf), v[b, g, cols])
            out[b, h, rows], lse[b, h, rows] = state.result()
    return out, lse


class _Online:
    """Softmax-weighted sum over a stream of tiles: running maximum m, sum l and accumulator a.

    Invariant after any tiles: l = Σ exp(s − m) and a = Σ exp(s − m) v over the keys so far. A
    larger maximum multiplies both by exp(m_old − m_new) ≤ 1, because every term used m_old.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.m = np.full(rows, -np.inf)
        self.l = np.zeros(rows)
        self.a = np.zeros((rows, width))

    def add(self, scores: np.ndarray, values: np.ndarray) -> None:
        m_new = np.maximum(self.m, scores.max(axis=1))
        # A row that has seen no key yet has m = −inf, and −inf − (−inf) is NaN.
        origin = np.where(m_new == -np.inf, 0.0, m_new)
        decay = np.exp(self.m - origin)
        p = np.exp(scores - origin[:, None])
        self.l = self.l * decay + p.sum(axis=1)
        self.a = self.a * decay[:, None] + p @ values
        self.m = m_new

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        seen = self.l > 0
        l_safe = np.where(seen, self.l, 1.0)
        return self.a / l_safe[:, None], np.where(seen, self.m + np.log(l_safe), -np.inf)


def attention_backward_tiled(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dlse: np.ndarray | float = 0.0,
    tile: int = 64,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`attention_backward` from the saved out and lse: weights are exp(s − lse), tile by tile.

    Σ_s w_s dw_s over a row equals dout · out, so no row-wise sum over keys is needed. The gradient
    of lse joins it: it is added to every dw of the row.
    """
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    dout, q, k, v, out, lse = (x.astype(np.float64) for x in (dout, q, k, v, out, lse))
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dot = np.sum(dout * out, axis=-1) - dlse
    # An empty row sees no key, so its log-sum-exp of −inf is never used.
    lse = np.where(np.isneginf(lse), 0.0, lse)
    for b, h in np.ndindex(B, H):
        g = h * G // H
        for cols in _spans(S, tile):
            for rows in _spans(T, tile):
                logits = q[b, h, rows] * scale @ k[b, g, cols].T
                capped = _capped(logits, softcap)
                seen = visible(rows, cols, S - T, causal, window)
                w = np.exp(np.where(seen, capped - lse[b, h, rows, None], -np.inf))
                dw = dout[b, h, rows] @ v[b, g, cols].T
                ds = w * (dw - dot[b, h, rows, None]) * scale
                if softcap:
                    ds *= 1.0 - (capped / softcap) ** 2
                dq[b, h, rows] += ds @ k[b, g, cols]
                dk[b, g, cols] += ds.T @ q[b, h, rows]
                dv[b, g, cols] += w.T @ dout[b, h, rows]
    return dq, dk, dv


def _spans(length: int, tile: int) -> Iterator[np.ndarray]:
    """Index ranges that cover 0 … length − 1, `tile` at a time; the last may be shorter."""
    for start in range(0, length, tile):
        yield np.arange(start, min(start + tile, length))


def _capped(logits: np.ndarray, softcap: float) -> np.ndarray:
    return softcap * np.tanh(logits / softcap) if softcap else logits


# --- paged: P positions per page -----------------------------------------------------------------


def paged_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    starts: np.ndarray,
    *,
    tree_mask: np.ndarray | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> np.ndarray:
    """(queries,H,D) of q (queries,H,D) over pages k, v (pages,G,P,D), in float64.

    The queries starts[b] … starts[b+1] are the last positions of sequence b. A query sees itself
    and all positions before it; with a tree mask it sees, of the new positions, those that the
    mask names. Keys are looked up one position at a time.
    """
    out = np.zeros(q.shape)
    for b, length in enumerate(seq_lens):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        keys, values = (_sequence(pages, block_table[b], int(length)) for pages in (k, v))
        for row in range(rows.start, rows.stop if length else rows.start):
            position = int(length) - (rows.stop - row)
            seen = _seen(position, int(length), rows, row, tree_mask, window)
            picked = [x[None, :, seen] for x in (keys, values)]
            one = q[None, row][:, :, None]  # (1,H,1,D)
            answer, _ = attention(one, *picked, softcap=softcap, scale=scale)
            out[row] = answer[0, :, 0]
    return out


def _sequence(pages: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """The rows of one sequence in order, (G, length, D)."""
    size = pages.shape[2]
    rows = [pages[table[s // size], :, s % size] for s in range(length)]
    return np.stack(rows, axis=1) if rows else np.zeros((pages.shape[1], 0, pages.shape[3]))


def _seen(
    position: int,
    length: int,
    rows: slice,
    row: int,
    tree_mask: np.ndarray | None,
    window: int | None,
) -> np.ndarray:
    """The positions that a query sees."""
    if tree_mask is None:
        first = 0 if window is None else max(0, position - window + 1)
        return np.arange(first, position + 1)
    fresh = rows.stop - rows.start
    new = np.flatnonzero(tree_mask[row, :fresh])
    return np.concatenate((np.arange(length - fresh), length - fresh + new))
