"""Models to train: the decoder without its caches, and the small model of the challenge.

Both take tokens (B, T) and give logits (B, T, V). What they hold is what is saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.layers import Norm
from trapline.gold.decoder.rope import frequencies
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.errors import RangeError
from trapline.gold.ternary.layers import TernaryEmbedding, TernaryLinear, ternarize
from trapline.gold.ternary.quantize import GROUP

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """The small model's sizes; its architecture is that of `small_lm`."""

    vocab: int
    dim: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if min(self.vocab, self.dim, self.heads, self.context) < 1 or self.layers < 0:
            raise RangeError(f"sizes must be positive, got {self}")
        if self.dim % self.heads:
            raise RangeError(f"dim {self.dim} does not divide into {self.heads} heads")


def decoder_config(
    shape: Shape, *, kv_heads: int | None = None, hidden: int | None = None, tied: bool = True
) -> DecoderConfig:
    """A Llama-shaped decoder with norms on queries and keys (Qwen3's form), no bias anywhere."""
    groups = kv_heads or shape.heads
    if shape.heads % groups:
        raise RangeError(f"{shape.heads} heads do not share {groups} key/value heads evenly")
    if shape.dim // shape.heads % 2:
        raise RangeError("rotary positions need an even head width")
    step = GROUP if shape.dim >= GROUP else 8
    return DecoderConfig(
        family="qwen3",
        vocab=shape.vocab,
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=groups,
        head_dim=shape.dim // shape.heads,
        hidden=hidden or cdiv(8 * shape.dim // 3, step) * step,
        context=shape.context,
        norm_eps=EPS,
        tied=tied,
        rope=RopeConfig(),
        qk_norm=True,
    )


def initialise(decoder: Decoder, seed: int) -> None:
    """Every matrix in^-½, what adds to the stream smaller with depth, an untied head small."""
    source = torch.Generator().manual_seed(seed)
    tied = decoder.config.tied
    depth = (2 * max(1, decoder.config.layers)) ** -0.5
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.ndim < 2:
                continue
            spread = unit(name, weight, tied=tied)
            if name.endswith(("attention.out.weight", "feedforward.down.weight")):
                spread *= depth
            if name.endswith("head.weight"):
                # A head that begins small begins close to "every token is equally likely".
                spread *= 0.2
            weight.copy_(
                torch.randn(weight.shape, generator=source, dtype=torch.float32, device="cpu")
                * spread
            )


def unit(name: str, parameter: Tensor, *, tied: bool) -> float:
    """The typical size of a weight at the start: learning rates are relative to it."""
    if parameter.ndim < 2:
        return 0.1
    if "embedding" in name and not tied:
        return 1.0
    return float(parameter.shape[1] ** -0.5)


class DecoderLM(nn.Module):
    """A decoder over whole windows: every row begins at position 0 and nothing is remembered."""

    angles: Tensor

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        config = decoder.config
        if config.rope is None or config.window is not None:
            raise RangeError("only models with rotary positions and full attention are trained")
        self.decoder = decoder
        turns = torch.arange(config.context)[:, None] * frequencies(config.rope, config.head_dim)
        self.register_buffer("angles", turns.repeat(1, 2), persistent=False)
        self._parts = _Parts(_embed, _layer, _head)

    @property
    def tied(self) -> bool:
        return self.decoder.config.tied

    def compile_parts(self) -> None:
        """Compiles embedding, layer and head apart: one layer's code serves all of them."""
        self._parts = _Parts(*(torch.compile(part, dynamic=False) for part in self._parts))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → logits (B, T, V)."""
        angles = self.angles[: tokens.shape[1]]
        turn = angles.cos(), angles.sin()
        x = self._parts.embed(self.decoder.embedding, tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        layers: Any = self.decoder.layers
        for layer in layers:
            x = self._parts.layer(layer, x, *turn)
        logits: Tensor = self._parts.head(self.decoder.norm, self.decoder.head, x)
        return logits


class _Parts(NamedTuple):
    """What a forward pass consists of, each a function of its modules and the stream."""

    embed: Callable[..., Tensor]
    layer: Callable[..., Tensor]
    head: Callable[..., Tensor]


def _embed(embedding: Any, tokens: Tensor) -> Tensor:
    rows: Tensor = embedding(tokens)
    return rows


def _layer(layer: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    config = layer.attention.config

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (_rotate(side, cosine, sine).to(v.dtype).transpose(1, 2) for side in (q, k))
        mixed = functional.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=config.heads != config.kv_heads
        )
        return mixed.transpose(1, 2)

    out: Tensor = layer(x, attend, _rms)
    return out


def _head(norm: Any, head: Any, x: Tensor) -> Tensor:
    logits: Tensor = head(_rms(norm, x))
    return logits


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x (B, T, heads, D) turned by angles (T, D), each written twice."""
    left, right = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat((-right, left), dim=-1) * sine[:, None]


def _rms(norm: Norm, x: Tensor) -> Tensor:
    """RMS norm in float32, in a form that a compiler fuses with its neighbours."""
    return functional.rms_norm(x.float(), norm.weight.shape, norm.weight, norm.eps)


class Block(nn.Module):
    """Attention with a distance penalty, then an MLP; norms have no weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.o = (TernaryLinear(shape.dim, shape.dim) for _ in range(4))
        self.up = TernaryLinear(shape.dim, 4 * shape.dim)
        self.down = TernaryLinear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        a = _norm(x)
        q, k, v = (self._split(part(a)) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.relu(self.up(_norm(x))))
        return out

    def _split(self, x: Tensor) -> Tensor:
        rows, length, dim = x.shape
        return x.reshape(rows, length, self.heads, dim // self.heads).transpose(1, 2)


class TernaryLM(nn.Module):
    """The small language model of `small_lm`, with every tensor ternary."""

    tied = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = TernaryEmbedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = TernaryLinear(shape.dim, shape.vocab)
        with torch.no_grad():
            self.head.weight.mul_(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → logits (B, T, V)."""
        x = self.embedding(tokens)
        bias = attention_bias(self.shape.heads, tokens.shape[1], tokens.device)
        for block in self.layers:
            x = block(x, bias)
        logits: Tensor = self.head(_norm(x))
        return logits

    def ternaries(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Every tensor by the name that `small_lm` gives it, as codes and scales."""
        found = {}
        for name, weight in self.named_parameters():
            codes, scales = ternarize(weight, GROUP)
            found[name.removesuffix(".weight")] = (codes.numpy(), scales.numpy())
        return found


def attention_bias(heads: int, length: int, device: torch.device) -> Tensor:
    """(H, T, T): minus slope times distance back, minus infinity ahead."""
    numbers = torch.arange(1, heads + 1, dtype=torch.float32, device=device)
    slopes = 2.0 ** (-8.0 * numbers / heads)
    places = torch.arange(length, dtype=torch.float32, device=device)
    back = places[:, None] - places[None, :]
    return torch.where(back >= 0, -slopes[:, None, None] * back, -torch.inf)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
