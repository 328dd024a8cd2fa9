"""The transformer layer: norms, attention, feed-forward.

A layer is given its attention: over the caches of packed sequences (`packing.py`), over rows of one
length (`tree_decoding.bulk_answers`), or over training windows (`ternary.training.model`). Decoding
steps run `joined_layer.py` instead; docs/decisions/0011-transformer-layers.md says why. Shape
letters: C channels, H query heads, G key/value heads, D head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.experts import Experts
from trapline.gold.norms.api import layer_norm, rms_norm


class Norm(nn.Module):
    """RMS norm, or layer norm if it has a bias. With `unit_offset` it multiplies by 1 + weight."""

    def __init__(self, width: int, eps: float, *, bias: bool, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    @property
    def scale(self) -> Tensor:
        """The factor of every channel; 1 + weight is not rounded to 16 bits."""
        if not self.unit_offset:
            return self.weight
        return 1.0 + (self.weight.float() if self.weight.itemsize < 4 else self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return tensor(rms_norm(x, self.scale, self.eps))
        return tensor(layer_norm(x, self.weight, self.bias, self.eps))


#: Mixes values: normed queries (…, H, D), keys and values (…, G, D), not yet rotated, to (…, H, D).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Applies a norm.
ApplyNorm = Callable[[Norm, Tensor], Tensor]


class Attention(nn.Module):
    """Projections and head norms around `attend`, which rotates, caches and mixes."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, wide, bias=config.attention_bias)
        self.k = nn.Linear(config.dim, narrow, bias=config.attention_bias)
        self.v = nn.Linear(config.dim, narrow, bias=config.attention_bias)
        self.out = nn.Linear(wide, config.dim, bias=config.out_bias)
        if config.qk_norm:
            offset = config.unit_offset
            self.q_norm = Norm(config.head_dim, config.norm_eps, bias=False, unit_offset=offset)
            self.k_norm = Norm(config.head_dim, config.norm_eps, bias=False, unit_offset=offset)

    def forward(self, x: Tensor, attend: Attend, norm: ApplyNorm) -> Tensor:
        heads = (-1, self.config.head_dim)
        q, k, v = (linear(x).unflatten(-1, heads) for linear in (self.q, self.k, self.v))
        if self.config.qk_norm:
            q, k = norm(self.q_norm, q), norm(self.k_norm, k)
        return tensor(self.out(attend(q, k, v).flatten(-2)))


class Feedforward(nn.Module):
    """SwiGLU, Gemma's GELU in its place, or GPT-2's two linear layers with GELU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden, bias=config.mlp_bias)
        self.down = nn.Linear(config.hidden, config.dim, bias=config.mlp_bias)
        self.gelu = config.gelu
        self.gate = None
        if not config.is_gpt2:
            self.gate = nn.Linear(config.dim, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return tensor(self.down(functional.gelu(self.up(x), approximate="tanh")))
        gate = self.gate(x)
        opened = functional.gelu(gate, approximate="tanh") if self.gelu else functional.silu(gate)
        return tensor(self.down(opened * self.up(x)))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals; Gemma norms their outputs too."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()

        def norm() -> Norm:
            offset = config.unit_offset
            return Norm(config.dim, config.norm_eps, bias=config.is_gpt2, unit_offset=offset)

        self.attention_norm = norm()
        self.attention = Attention(config, config.window_of(number))
        self.attention_post_norm = norm() if config.post_norms else None
        self.feedforward_norm = norm()
        experts = config.experts_of(number)
        self.feedforward = Feedforward(config) if experts is None else Experts(config.dim, experts)
        self.feedforward_post_norm = norm() if config.post_norms else None

    def forward(self, x: Tensor, attend: Attend, norm: ApplyNorm = Norm.__call__) -> Tensor:
        mixed = self.attention(norm(self.attention_norm, x), attend, norm)
        if self.attention_post_norm is not None:
            mixed = norm(self.attention_post_norm, mixed)
        x = x + mixed
        added = self.feedforward(norm(self.feedforward_norm, x))
        if self.feedforward_post_norm is not None:
            added = norm(self.feedforward_post_norm, added)
        return tensor(x + added)


def tensor(value: object) -> Tensor:
    """Narrows the result of an untyped module to a Tensor."""
    assert isinstance(value, Tensor)
    return value
