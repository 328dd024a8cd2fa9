"""The small operations of a decoding step, fused: kernels for CUDA tensors, torch for others.

Norms with their residual are `gold.norms`; what is left of a layer between its matrix products is
here. Shape letters: B rows (one new token each), H query heads, G key/value heads, D width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.decoder.rope import rotate


class Turn(NamedTuple):
    """What happens to queries and keys before they are used."""

    #: (context, D/2) cosine and sine of every position; None for learned positions.
    cosine: Tensor | None
    sine: Tensor | None
    #: (D,) weights of the norms of queries and keys, for models that have them.
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def turn_and_append(
    qkv: Tensor, turn: Turn, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Splits (B, (H + 2G) · D), norms and turns queries and keys, stores keys and values.

    keys and values are (slots, G, D) of one layer; a slot of −1 stores nothing. Answers the
    queries (B, H, D).
    """
    if qkv.is_cuda:
        from trapline.gold.decoder import kernels

        return kernels.turn_and_append(qkv, turn, positions, slots, keys, values)
    q: Tensor
    groups, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * groups
    q, k, v = torch.split(qkv.view(len(qkv), -1, width), [heads, groups, groups], dim=1)
    if turn.q_norm is not None and turn.k_norm is not None:
        q, k = _normed(q, turn.q_norm, turn.eps), _normed(k, turn.k_norm, turn.eps)
    if turn.cosine is not None and turn.sine is not None:
        angles = turn.cosine[positions], turn.sine[positions]
        q, k = rotate(q, *angles), rotate(k, *angles)
    stored = slots >= 0
    keys[slots[stored]] = k[stored]
    values[slots[stored]] = v[stored]
    return q


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    page_size: int,
    window: int | None,
) -> Tensor:
    """Each row's one query (B, H, D) over its own pages of keys and values (slots, G, D).

    table (B, M) names each row's pages, lengths (B,) how many positions it has.
    """
    places = torch.arange(page_size, device=q.device)
    slots = (table[:, :, None] * page_size + places).flatten(1)  # (B, S)
    groups, width = keys.shape[1:]
    k, v = (stored[slots].transpose(1, 2) for stored in (keys, values))  # (B, G, S, D)
    scores = (q.view(len(q), groups, -1, width) @ k.transpose(-1, -2)).float() * width**-0.5
    position = torch.arange(slots.shape[1], device=q.device)
    hidden = position >= lengths[:, None]
    if window is not None:
        hidden = hidden | (position < lengths[:, None] - window)
    weights = torch.softmax(scores.masked_fill(hidden[:, None, None], -torch.inf), dim=-1)
    return (weights.to(v.dtype) @ v).view(q.shape)


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) · up of (B, 2 · hidden), the gates in front."""
    if both.is_cuda:
        from trapline.gold.decoder import kernels

        return kernels.swiglu(both)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
