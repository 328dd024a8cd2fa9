"""Attention over pages in torch: the pages of a sequence are gathered, then attended as one.

16-bit inputs are computed in float32. `kernels_paged` has the same two operators for a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.kv_cache.torch_backend import codec

_SCHEMAS = {
    "attention": "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens,"
    " Tensor? cu_q, int max_q, Tensor? k_scale, Tensor? v_scale, Tensor? tree_mask, int window,"
    " float softcap, float scale, int prefix_rows, Tensor? prefix_pages, Tensor(a!) out) -> ()",
    "append": "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots,"
    " Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? cosine, Tensor? sine) -> ()",
}
#: The namespace of the operators in this file; `kernels_paged` registers the same two.
TORCH = "trapline_paged"


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor | None,
    max_q: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
    prefix_rows: int,
    prefix_pages: Tensor | None,
    out: Tensor | None,
    operators: str,
) -> Tensor:
    """(queries, H, D), written to `out` where that is given."""
    answer = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    getattr(torch.ops, operators).attention(
        *(q, k_pages, v_pages, block_table, seq_lens, cu_q, max_q, k_scale, v_scale, tree_mask),
        *(window, softcap, scale, prefix_rows, prefix_pages, answer),
    )
    return answer


def paged_append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    operators: str,
) -> None:
    """Writes tokens to their slots, in place."""
    getattr(torch.ops, operators).append(
        k, v, k_pages, v_pages, slots, k_scale, v_scale, cosine, sine
    )


def _attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor | None,
    max_q: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
    prefix_rows: int,
    prefix_pages: Tensor | None,
    out: Tensor,
) -> None:
    del prefix_rows, prefix_pages  # sequences are computed one by one
    ends = list(range(0, len(q) + 1, max_q)) if cu_q is None else cu_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows = slice(ends[b], ends[b + 1])
        if not length:
            out[rows] = 0.0
            continue
        pages = block_table[b, : cdiv(length, k_pages.shape[2])].long()
        keys = _gathered(k_pages, k_scale, pages, length, q)
        values = _gathered(v_pages, v_scale, pages, length, q)
        mask = None if tree_mask is None else tree_mask[rows]
        seen = _seen(rows.stop - rows.start, length, window, mask, q.device)
        out[rows] = _attended(q[rows], keys, values, seen, softcap, scale).to(q.dtype)


def _gathered(
    pages: Tensor, scales: Tensor | None, chosen: Tensor, length: int, q: Tensor
) -> Tensor:
    """The rows of one sequence, (G, length, D), in the dtype that is computed in."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = pages[chosen].transpose(0, 1).flatten(1, 2)[:, :length]
    if scales is None:
        return rows.to(wide)
    own = scales[chosen].transpose(0, 1).flatten(1, 2)[:, :length, None]
    stored = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    made: Tensor = codec(_bits(pages.dtype), q.shape[-1], fitted=False).decode((stored, own), wide)
    return made


def _bits(dtype: torch.dtype) -> int | str:
    kinds: dict[torch.dtype, int | str]
    kinds = {torch.int8: 8, torch.uint8: 4, torch.float8_e4m3fn: "fp8"}
    return kinds[dtype]


def _seen(new: int, length: int, window: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Which positions each new one sees, bool (new, length)."""
    key = torch.arange(length, device=device)
    position = torch.arange(length - new, length, device=device)[:, None]
    if mask is None:
        seen = key <= position
        return seen & (position - key < window) if window else seen
    older = torch.ones(new, length - new, dtype=torch.bool, device=device)
    return torch.cat((older, mask[:, :new]), dim=1)


def _attended(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, softcap: float, scale: float
) -> Tensor:
    """(n, H, D) of queries (n, H, D); the query heads of a group are an axis of their own."""
    n, H, D = q.shape
    G = keys.shape[0]
    grouped = q.to(keys.dtype).view(n, G, H // G, D)
    scores = torch.einsum("ngrd,gsd->ngrs", grouped, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    # A query that sees nothing has no softmax: its weights are zero.
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return torch.einsum("ngrs,gsd->ngrd", weights, values).reshape(n, H, D)


def _append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> None:
    if cosine is not None and sine is not None:
        k = _turned(k, cosine, sine)
    kept = slots >= 0
    slot = slots[kept]
    size = k_pages.shape[2]
    page, place = slot // size, slot % size
    for rows, pages, scales in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if scales is None:
            pages[page, :, place] = rows[kept]
            continue
        code = codec(_bits(pages.dtype), rows.shape[-1], fitted=False)
        codes, own = code.encode(rows[kept])
        stored = pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages
        stored[page, :, place] = codes
        scales[page, :, place] = own[..., 0]


def _turned(k: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE of (tokens, G, D); rounded to k's dtype, as if it had been stored between."""
    left, right = k.to(torch.promote_types(k.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = (x[:, None].to(left.dtype) for x in (cosine, sine))
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(k.dtype)


def define(namespace: str) -> Any:
    """Both operators under a namespace, still without an implementation."""
    library: Any = torch.library  # its calls carry no types
    made = library.Library(namespace, "DEF")
    for name, schema in _SCHEMAS.items():
        made.define(name + schema)
        made.impl(name, _writes_in_place, "Meta")
    return made


def _writes_in_place(*_: Any) -> None:
    """What tracing sees: nothing is returned."""


_LIBRARY = define(TORCH)
_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("append", _append, "CompositeExplicitAutograd")
