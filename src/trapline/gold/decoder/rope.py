"""Rotary positions, in half-split order: element d turns with element d + D/2."""

import math

import torch
from torch import Tensor

from trapline.gold.decoder.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """(D/2,) radians a position, stretched as the configuration says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    return base


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Short waves stay, long ones are stretched by `factor`, those between are blended."""
    wavelengths = 2 * math.pi / base
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    turns = rope.original_context / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * base / rope.factor + blend * base
    stretched = torch.where(wavelengths > longest, base / rope.factor, between)
    return torch.where(wavelengths < shortest, base, stretched)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x (tokens, heads, D) turned by the angles (tokens, D/2)."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
