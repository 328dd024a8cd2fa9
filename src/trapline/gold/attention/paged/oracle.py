"""Attention over pages in float64 NumPy: every key is looked up, one position at a time.

Axis letters: B sequences, H query heads, G key/value heads, P positions a page, D width.
"""

import numpy as np

from trapline.gold.attention import oracle


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

    The queries starts[b] … starts[b+1] are the last positions of sequence b. A query sees what came
    before it and itself; with a tree mask it sees, among the new ones, those that the mask names.
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
            answer, _ = oracle.attention(one, *picked, softcap=softcap, scale=scale)
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
