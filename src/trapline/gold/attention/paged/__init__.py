"""Attention over a paged key/value cache: sequences lie on pages that a table lists."""

from typing import Any, NamedTuple


class PagedProblem(NamedTuple):
    """One call of paged attention. The fields are the operators' arguments, in their order."""

    q: Any
    k_pages: Any
    v_pages: Any
    block_table: Any
    seq_lens: Any
    #: Boundaries of the sequences' queries; None if each has max_q.
    cu_q: Any
    max_q: int
    #: Scales of pages that hold codes, or None.
    k_scale: Any
    v_scale: Any
    #: Which new positions each query sees; None for all before it.
    tree_mask: Any
    #: 0 means no window.
    window: int
    #: 0.0 means no cap.
    softcap: float
    scale: float
    #: Sequences that share a prefix, and its pages per group; 0 and None without one.
    prefix_rows: int
    prefix_pages: Any
    #: Where the result is written.
    out: Any


ATTENTION_SCHEMA = (
    "attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens,"
    " Tensor? cu_q, int max_q, Tensor? k_scale, Tensor? v_scale, Tensor? tree_mask, int window,"
    " float softcap, float scale, int prefix_rows, Tensor? prefix_pages, Tensor(a!) out) -> ()"
)
APPEND_SCHEMA = (
    "append(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots,"
    " Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? cosine, Tensor? sine) -> ()"
)
