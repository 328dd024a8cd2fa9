"""The readable transformer layer: norms, attention, feed-forward.

Sequences are packed one after another without padding (`packing.py`). Shape letters: N packed
tokens, C channels, H query heads, G key/value heads, D head width.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.attention.api import flash_attention_varlen
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.packing import LayerKV, Packing, joined
from trapline.gold.decoder.rope import rotate
from trapline.gold.norms.api import layer_norm, rms_norm


class Norm(nn.Module):
    """RMS norm, or layer norm if it has a bias."""

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return tensor(rms_norm(x, self.weight, self.eps))
        return tensor(layer_norm(x, self.weight, self.bias, self.eps))


class Attention(nn.Module):
    """Projections, RoPE, cache update, attention."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, wide, bias=config.attention_bias)
        self.k = nn.Linear(config.dim, narrow, bias=config.attention_bias)
        self.v = nn.Linear(config.dim, narrow, bias=config.attention_bias)
        self.out = nn.Linear(wide, config.dim, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.norm_eps, bias=False)
            self.k_norm = Norm(config.head_dim, config.norm_eps, bias=False)

    def forward(self, x: Tensor, packing: Packing, layer: int) -> Tensor:
        shape = (len(x), -1, self.config.head_dim)
        q, k, v = (linear(x).view(shape) for linear in (self.q, self.k, self.v))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if packing.angles is not None:
            q, k = rotate(q, *packing.angles), rotate(k, *packing.angles)
        attend = self._causal if packing.masks is None else self._masked
        mixed = attend(q, packing.append(layer, k, v), packing)
        return tensor(self.out(mixed.reshape(len(x), -1)))

    def _causal(self, q: Tensor, parts: list[LayerKV], packing: Packing) -> Tensor:
        """New queries of each sequence over its whole cache, aligned at the end."""
        rows = joined(parts)
        return tensor(
            flash_attention_varlen(
                q,
                rows.keys,
                rows.values,
                packing.boundaries(packing.counts),
                packing.boundaries(rows.lengths),
                max(packing.counts),
                max(rows.lengths),
                causal=True,
                window=self.window,
            )
        )

    def _masked(self, q: Tensor, parts: list[LayerKV], packing: Packing) -> Tensor:
        """Attention under given masks, as for the nodes of a draft tree."""
        assert packing.masks is not None
        places = torch.split(packing.positions, packing.counts)
        masks = map(self._inside_window, packing.masks, places)
        stored = (one for part in parts for one in part.each())
        queries = torch.split(q, packing.counts)
        sequences = zip(queries, stored, masks, strict=True)
        return torch.cat([_masked_attention(one, *rows, mask) for one, rows, mask in sequences])

    def _inside_window(self, mask: Tensor, place: Tensor) -> Tensor:
        """Applies the window by position: a tree has several nodes at one position."""
        if self.window is None:
            return mask
        before = torch.arange(mask.shape[1] - len(place), device=place.device)
        distance = place[:, None] - torch.cat((before, place))
        return mask & (distance < self.window)


def _masked_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q (n, H, D) over keys and values (S, G, D) where mask (n, S) is True."""
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    seen = functional.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
    return seen[0].transpose(0, 1)


class Feedforward(nn.Module):
    """SwiGLU, or GPT-2's two linear layers with GELU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden, bias=config.mlp_bias)
        self.down = nn.Linear(config.hidden, config.dim, bias=config.mlp_bias)
        self.gate = None
        if not config.is_gpt2:
            self.gate = nn.Linear(config.dim, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return tensor(self.down(functional.gelu(self.up(x), approximate="tanh")))
        return tensor(self.down(functional.silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim, config.norm_eps, bias=config.is_gpt2)
        self.attention = Attention(config, config.window_of(number))
        self.feedforward_norm = Norm(config.dim, config.norm_eps, bias=config.is_gpt2)
        self.feedforward = Feedforward(config)

    def forward(self, x: Tensor, packing: Packing, number: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), packing, number)
        return tensor(x + self.feedforward(self.feedforward_norm(x)))


def tensor(value: object) -> Tensor:
    """Narrows the result of an untyped module to a Tensor."""
    assert isinstance(value, Tensor)
    return value


def join_weights(*parts: Any) -> Tensor:
    """Concatenates weights; the parts become views of the result, so none is stored twice."""
    weights = [tensor(part.weight).detach() for part in parts]
    first, sizes = weights[0], [len(weight) for weight in weights]
    adjacent = all(weight.is_contiguous() for weight in weights) and all(
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
        for one, other in pairwise(weights)
    )
    if adjacent:  # joined by an earlier call
        return first.as_strided((sum(sizes), first.shape[1]), first.stride())
    whole = torch.cat(weights)
    for part, piece in zip(parts, torch.split(whole, sizes), strict=True):
        part.weight.data = piece
    return whole
