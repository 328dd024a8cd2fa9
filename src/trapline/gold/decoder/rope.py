"""Rotary positions in half-split order: element d rotates with element d + D/2."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trapline.gold.decoder.rope_config import RopeConfig


class Rope(NamedTuple):
    """Head norms and rotation of queries and keys."""

    #: (context, D/2) cosine and sine of every position; None for learned positions.
    cosine: Tensor | None
    sine: Tensor | None
    #: (D,) weights of the head norms of queries and keys; None without them.
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def angles(rope: RopeConfig, head_dim: int, positions: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """Cosine and sine of every position, (n, D/2) each, in the dtype and device of `like`."""
    turns = frequencies(rope, head_dim).to(like.device)
    turned = positions.to(like.device)[:, None].float() * turns
    return tuple((part * rope.attention_factor).to(like) for part in (turned.cos(), turned.sin()))


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """(D/2,) radians a position, stretched by the configuration."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    if rope.kind == "longrope":
        divisors = torch.tensor(rope.long_factor if rope.long else rope.short_factor, device="cpu")
        return 1.0 / (divisors.float() * rope.theta**exponents)
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim)
    return base


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Keeps short wavelengths, stretches long ones by `factor`, blends between."""
    wavelengths = 2 * math.pi / base
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    turns = rope.original_context / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * base / rope.factor + blend * base
    stretched = torch.where(wavelengths > longest, base / rope.factor, between)
    return torch.where(wavelengths < shortest, base, stretched)


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Keeps high frequencies, stretches low ones, with a linear ramp between."""

    def element(turns: float) -> float:
        """The element that rotates this often in the original context."""
        wavelength = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = element(rope.beta_fast), element(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    stretched = (
        (torch.arange(head_dim // 2, dtype=torch.float32, device=base.device) - low) / width
    ).clamp(0, 1)
    return base / rope.factor * stretched + base * (1 - stretched)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates x (tokens, heads, D) by angles (tokens, D/2)."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
