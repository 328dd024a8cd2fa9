"""Flash attention, forward and backward: the query heads of a group are folded into the rows.

Query heads that share a key/value head are handled as one block of rows (B, G, R*rows, D),
R = H/G, so a product with that block sums over the group by itself.
"""

from operator import index

import numpy as np


def _fold(array, groups):
    """(B, H, T, ...) seen as (B, G, R, T, ...): the heads h of a group g = h // R side by side."""
    batch, heads = array.shape[:2]
    return array.reshape(batch, groups, heads // groups, *array.shape[2:])


def _rows_of(folded, rows):
    """The rows of a folded array as one block (B, G, R*len(rows), ...)."""
    part = folded[:, :, :, rows]
    return part.reshape(*part.shape[:2], part.shape[2] * part.shape[3], *part.shape[4:])


def _first_row(queries, keys, causal):
    """The first query that sees a key."""
    return max(0, queries - keys) if causal else 0


def _key_tiles(rows, queries, keys, causal, tile):
    """Pairs (slice of keys, mask or None) of the tiles that some query of `rows` sees.

    The mask is (rows, keys of the tile), True where the key is hidden.
    """
    shift = keys - queries
    stop = min(keys, rows.stop + shift) if causal else keys
    for start in range(0, stop, tile):
        cols = slice(start, min(start + tile, stop))
        hidden = None
        if causal and cols.stop - 1 > rows.start + shift:
            last_seen = np.arange(rows.start, rows.stop) + shift
            hidden = np.arange(cols.start, cols.stop) > last_seen[:, None]
        yield cols, hidden


def _query_tiles(queries, keys, causal, tile):
    """Slices of the queries that see a key."""
    for start in range(_first_row(queries, keys, causal), queries, tile):
        yield slice(start, min(start + tile, queries))


def _scores(scaled_q, k_tile, hidden):
    """Scores of a folded block, (B, G, R*rows, keys), with -inf at the hidden keys."""
    scores = scaled_q @ k_tile.swapaxes(-1, -2)
    if hidden is not None:
        by_head = scores.reshape(*scores.shape[:2], -1, *hidden.shape)
        np.copyto(by_head, -np.inf, where=hidden)
    return scores


def _check(q, k, v, tile):
    """Refuse what does not fit; returns tile as an int."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError("q, k and v must have four axes")
    for array in (q, k, v):
        if array.dtype not in (np.float32, np.float64):
            raise TypeError(f"float32 or float64 expected, not {array.dtype}")
    if k.shape != v.shape:
        raise ValueError("k and v must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError("q and k must agree in batch and width")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError("the number of query heads must be a multiple of that of key/value heads")
    tile = index(tile)
    if tile < 1:
        raise ValueError("tile must be at least 1")
    return tile


def _check_saved(dout, q, out, lse):
    """Refuse what cannot belong to a forward pass of q."""
    if dout.shape != q.shape or out.shape != q.shape:
        raise ValueError("dout and out must have the shape of q")
    if lse.shape != q.shape[:3]:
        raise ValueError("lse must have the shape (B, H, T)")
    for array in (dout, out, lse):
        if array.dtype not in (np.float32, np.float64):
            raise TypeError(f"float32 or float64 expected, not {array.dtype}")


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    tile = _check(q, k, v, tile)
    queries, width = q.shape[2:]
    groups, keys = k.shape[1:3]
    scale = width**-0.5
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    if 0 in (q.shape[0], queries, keys):
        return out, lse

    q_folded, out_folded, lse_folded = _fold(q, groups), _fold(out, groups), _fold(lse, groups)
    for rows in _query_tiles(queries, keys, causal, tile):
        scaled_q = _rows_of(q_folded, rows) * scale
        top = np.full((*scaled_q.shape[:3], 1), -np.inf, q.dtype)
        mass = np.zeros_like(top)
        mixed = np.zeros_like(scaled_q)
        for cols, hidden in _key_tiles(rows, queries, keys, causal, tile):
            weights = _scores(scaled_q, k[:, :, cols], hidden)
            new_top = np.maximum(top, weights.max(axis=-1, keepdims=True))
            shrink = np.exp(top - new_top)
            weights -= new_top
            np.exp(weights, out=weights)
            mass = mass * shrink + weights.sum(axis=-1, keepdims=True)
            mixed *= shrink
            mixed += weights @ v[:, :, cols]
            top = new_top
        out_folded[:, :, :, rows] = _fold_rows(mixed / mass, rows)
        lse_folded[:, :, :, rows] = _fold_rows(top + np.log(mass), rows)[..., 0]
    return out, lse


def _fold_rows(block, rows):
    """Undo _rows_of: (B, G, R*rows, X) as (B, G, R, rows, X)."""
    return block.reshape(*block.shape[:2], -1, rows.stop - rows.start, block.shape[-1])


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
    tile = _check(q, k, v, tile)
    _check_saved(dout, q, out, lse)
    queries, width = q.shape[2:]
    groups, keys = k.shape[1:3]
    scale = width**-0.5
    dq = np.zeros(q.shape, q.dtype)
    dk = np.zeros(k.shape, q.dtype)
    dv = np.zeros(v.shape, q.dtype)
    if 0 in (q.shape[0], queries, keys):
        return dq, dk, dv

    q_folded, dq_folded, dout_folded = _fold(q, groups), _fold(dq, groups), _fold(dout, groups)
    out_folded, lse_folded = _fold(out, groups), _fold(lse, groups)
    for rows in _query_tiles(queries, keys, causal, tile):
        scaled_q = _rows_of(q_folded, rows) * scale
        dout_rows = _rows_of(dout_folded, rows)
        lse_rows = _rows_of(lse_folded, rows)[..., None]
        delta = (dout_rows * _rows_of(out_folded, rows)).sum(axis=-1, keepdims=True)
        dq_rows = np.zeros_like(scaled_q)
        for cols, hidden in _key_tiles(rows, queries, keys, causal, tile):
            k_tile, v_tile = k[:, :, cols], v[:, :, cols]
            weights = _scores(scaled_q, k_tile, hidden)
            weights -= lse_rows
            # A weight is at most 1; a saved lse that was rounded down must not make it overflow.
            np.minimum(weights, 0, out=weights)
            np.exp(weights, out=weights)
            dv[:, :, cols] += weights.swapaxes(-1, -2) @ dout_rows
            dscores = dout_rows @ v_tile.swapaxes(-1, -2)
            dscores -= delta
            dscores *= weights
            dq_rows += dscores @ k_tile
            dk[:, :, cols] += dscores.swapaxes(-1, -2) @ scaled_q
        dq_folded[:, :, :, rows] = _fold_rows(dq_rows * scale, rows)
    return dq, dk, dv
