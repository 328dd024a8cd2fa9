"""Attention over pages in torch: the pages of each sequence are gathered into one tensor.

16-bit inputs are computed in float32. `triton.attention` has the same two operators for GPUs.
"""

from typing import Any

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.paged import APPEND_SCHEMA, ATTENTION_SCHEMA, PagedProblem
from trapline.gold.kv_cache.torch_backend import codec
from trapline.gold.operators import operator, returns_nothing


@operator("trapline_paged", ATTENTION_SCHEMA, returns_nothing)
def attention_operator(*arguments: Any) -> None:
    """Write the attention of a `PagedProblem`, whose fields are the arguments, to its `out`."""
    attention(PagedProblem(*arguments))


def attention(problem: PagedProblem) -> None:
    """Sequences are computed one by one; a shared prefix changes nothing."""
    q, k_pages, v_pages, out = problem.q, problem.k_pages, problem.v_pages, problem.out
    block_table, tree_mask, cu_q = problem.block_table, problem.tree_mask, problem.cu_q
    max_q, softcap, scale = problem.max_q, problem.softcap, problem.scale
    ends = list(range(0, len(q) + 1, max_q)) if cu_q is None else cu_q.tolist()
    for b, length in enumerate(problem.seq_lens.tolist()):
        rows = slice(ends[b], ends[b + 1])
        if not length:
            out[rows] = 0.0
            continue
        pages = block_table[b, : cdiv(length, k_pages.shape[2])].long()
        keys = _gathered(k_pages, problem.k_scale, pages, length, q)
        values = _gathered(v_pages, problem.v_scale, pages, length, q)
        mask = None if tree_mask is None else tree_mask[rows]
        seen = _seen(rows.stop - rows.start, length, problem.window, mask, q.device)
        out[rows] = _attended(q[rows], keys, values, seen, softcap, scale).to(q.dtype)


def _gathered(
    pages: Tensor, scales: Tensor | None, chosen: Tensor, length: int, q: Tensor
) -> Tensor:
    """The rows of one sequence, (G, length, D), in the dtype of intermediate results."""
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
    """Which positions each query sees, bool (new, length)."""
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
    """(n, H, D) of queries (n, H, D); query heads that share keys are an axis of their own."""
    n, H, D = q.shape
    G = keys.shape[0]
    grouped = q.to(keys.dtype).view(n, G, H // G, D)
    scores = torch.einsum("ngrd,gsd->ngrs", grouped, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    # A query that sees nothing has weights of zero.
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return torch.einsum("ngrs,gsd->ngrd", weights, values).reshape(n, H, D)


def append(*arguments: Any) -> None:
    """Write tokens to their slots, in place. The arguments are those of the schema."""
    k, v, k_pages, v_pages, slots, k_scale, v_scale, cosine, sine = arguments
    if cosine is not None and sine is not None:
        k = _rotated(k, cosine, sine)
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


append_operator = operator("trapline_paged", APPEND_SCHEMA, returns_nothing)(append)


def _rotated(k: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE of (tokens, G, D); rounded to k's dtype, as if stored in between."""
    left, right = k.to(torch.promote_types(k.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = (x[:, None].to(left.dtype) for x in (cosine, sine))
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(k.dtype)
