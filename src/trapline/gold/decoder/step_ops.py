"""Fused operations between the matrix products of a decoding step: Triton, C or torch.

Norms with their residual are in `gold.norms`. Shape letters: B rows (one new token each), H query
heads, G key/value heads, D head width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.attention.paged.api import paged_attention
from trapline.gold.decoder.config import AttentionRules
from trapline.gold.decoder.cpu import compiled_ops
from trapline.gold.decoder.layers import tensor
from trapline.gold.decoder.pool import StoredLayer
from trapline.gold.decoder.rope import Rope, rotate


class DecodeBatch(NamedTuple):
    """(B,) tensors of one new token a row, and the pages of its keys and values.

    Rows come in groups of `beams` that share `prefix` (groups,) positions on `pages` (groups, M) of
    `page_size`. A row's other positions lie on its `tails` (B, M), pages of `tail_size`. Rows that
    share nothing have only tails.
    """

    ids: Tensor
    positions: Tensor
    active: Tensor
    tails: Tensor
    tail_size: int
    pages: Tensor
    page_size: int
    prefix: Tensor
    beams: int = 1


def rope_and_append(
    qkv: Tensor, rope: Rope, positions: Tensor, slots: Tensor, stored: StoredLayer
) -> Tensor:
    """Splits (B, (H + 2G) · D), applies head norms and RoPE, stores keys and values.

    A slot of −1 stores nothing. Returns the queries (B, H, D).
    """
    groups, width = stored.keys.shape[1], stored.width
    if qkv.is_cuda:
        from trapline.gold.decoder.triton import step_elementwise

        if stored.scales is None:
            args = qkv, rope, positions, slots, stored.keys, stored.values
            return step_elementwise.rope_and_append(*args)
        k, v = qkv.new_empty((2, len(qkv), groups, width))
        here = torch.arange(len(qkv), device=qkv.device)
        q = step_elementwise.rope_and_append(qkv, rope, positions, here, k, v)
        stored.put(slots, k, v)
        return q
    if stored.scales is None and compiled_ops.suits(qkv, *rope[:4], stored.keys, stored.values):
        args = qkv, rope, positions, slots, stored.keys, stored.values
        return compiled_ops.rope_and_append(*args)
    heads = qkv.shape[1] // width - 2 * groups
    q, k, v = torch.split(qkv.view(len(qkv), -1, width), [heads, groups, groups], dim=1)
    if rope.q_norm is not None and rope.k_norm is not None:
        q, k = _normed(q, rope.q_norm, rope.eps), _normed(k, rope.k_norm, rope.eps)
    if rope.cosine is not None and rope.sine is not None:
        angles = rope.cosine[positions], rope.sine[positions]
        q, k = rotate(q, *angles), rotate(k, *angles)
    kept = slots >= 0
    if not bool(kept.all()):
        slots, k, v = slots[kept], k[kept], v[kept]
    stored.put(slots, k, v)
    return q


class SharedPrefix(NamedTuple):
    """Rows `first` to `last` − 1 begin with the same `pages` full pages."""

    first: int
    last: int
    pages: int


def decode_attention(
    q: Tensor,
    stored: StoredLayer,
    table: Tensor,
    lengths: Tensor,
    rules: AttentionRules,
    shared: Sequence[SharedPrefix] = (),
) -> Tensor:
    """One query a row (B, H, D) over the row's pages of one layer.

    table (B, M) lists the pages of each row, lengths (B,) its positions, both int32. On a GPU, and
    for quantised pages, this is `paged_attention`. On a CPU all rows are computed together, and
    shared pages are read once.
    """
    if q.is_cuda or stored.scales is not None:
        given = {**stored.pages(), "window": rules.window, "softcap": rules.softcap}
        given |= {"scale": rules.scale, "block_table": table, "seq_lens": lengths}
        return tensor(paged_attention(q, **given))
    if rules.window is not None or not shared:
        return _alone(q, stored, table, lengths, rules)
    out = torch.empty_like(q)
    alone = torch.ones(len(q), dtype=torch.bool, device="cpu")
    for first, last, pages in shared:
        rows = slice(first, last)
        alone[rows] = False
        out[rows] = _after_prefix(q[rows], stored, table[rows], lengths[rows], rules, pages)
    if bool(alone.any()):
        out[alone] = _alone(q[alone], stored, table[alone], lengths[alone], rules)
    return out


def _alone(
    q: Tensor, stored: StoredLayer, table: Tensor, lengths: Tensor, rules: AttentionRules
) -> Tensor:
    """All rows at once, each over its own pages."""
    rows, size = (stored.keys, stored.values), stored.page_size
    if compiled_ops.suits(q, *rows):
        return compiled_ops.attend(q, rows, table, lengths, size, rules)
    k, v = (_gathered(x, table, size) for x in rows)
    seen = _seen(lengths, k.shape[2], rules.window)
    # Heads that share keys take the place of queries.
    grouped = q.reshape(len(k), k.shape[1], -1, q.shape[-1])
    return masked_attention(grouped, k, v, seen[:, None, None], rules).reshape(q.shape)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rules: AttentionRules
) -> Tensor:
    """q (B, H, n, D) over k and v (B, G, S, D) where mask is True; windows are in the mask."""
    if not rules.softcap:
        return functional.scaled_dot_product_attention(
            q, k, v, mask, scale=rules.scale, enable_gqa=True
        )
    grouped = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])  # (B, G, R, n, D)
    products = grouped @ k.transpose(-1, -2)[:, :, None]
    scores = _scores(products, rules).masked_fill(
        ~(mask[:, :, None] if mask.ndim == 4 else mask), -torch.inf
    )
    return (torch.softmax(scores, dim=-1).to(v.dtype) @ v[:, :, None]).flatten(1, 2)


def _scores(products: Tensor, rules: AttentionRules) -> Tensor:
    """Scaled and capped scores in float32 at least."""
    scores = (products.float() if products.itemsize < 4 else products) * rules.scale
    return torch.tanh(scores / rules.softcap) * rules.softcap if rules.softcap else scores


def _after_prefix(
    q: Tensor,
    stored: StoredLayer,
    table: Tensor,
    lengths: Tensor,
    rules: AttentionRules,
    pages: int,
) -> Tensor:
    """Rows with a common prefix, whose keys and values are used in one product for all rows."""
    (rows, heads, width), groups, size = q.shape, stored.keys.shape[1], stored.page_size
    both = stored.keys, stored.values
    k, v = (_gathered(x, table[:1, :pages], size)[0] for x in both)  # (G, S, D)
    own_k, own_v = (_gathered(x, table[:, pages:], size) for x in both)
    grouped = q.view(rows, groups, -1, width)
    together = grouped.transpose(0, 1).flatten(1, 2)  # (G, B · R, D)
    # Copies: a product with a transposed view takes ten times as long on some CPUs.
    common = (together @ k.transpose(1, 2).contiguous()).view(groups, rows, -1, k.shape[1])
    common = common.transpose(0, 1)  # (B, G, R, prefix)
    own = grouped @ own_k.transpose(-1, -2).contiguous()  # (B, G, R, tail)
    seen = _seen(lengths - pages * size, own_k.shape[2], None)
    own = _scores(own, rules).masked_fill(~seen[:, None, None], -torch.inf)
    scores = torch.cat((_scores(common, rules), own), dim=-1)
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    for_prefix, for_own = weights[..., : k.shape[1]], weights[..., k.shape[1] :]
    out = (for_prefix.transpose(0, 1).flatten(1, 2) @ v).view(groups, rows, -1, width)
    return (out.transpose(0, 1) + for_own @ own_v).reshape(rows, heads, width)


def _gathered(stored: Tensor, table: Tensor, page_size: int) -> Tensor:
    """(B, G, S, D) copied page by page."""
    groups, width = stored.shape[1:]
    pages = stored.view(-1, page_size * groups * width).index_select(0, table.flatten())
    return pages.view(len(table), -1, groups, width).transpose(1, 2)


def _seen(lengths: Tensor, positions: int, window: int | None) -> Tensor:
    """(B, S): positions that exist and lie inside the window."""
    position = torch.arange(positions, device=lengths.device)
    seen = position < lengths[:, None]
    return seen if window is None else seen & (position >= lengths[:, None] - window)


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) · up of (B, 2 · hidden), gates first."""
    if both.is_cuda:
        from trapline.gold.decoder.triton import step_elementwise

        return step_elementwise.swiglu(both)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
