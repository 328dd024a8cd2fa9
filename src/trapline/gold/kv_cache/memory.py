"""How many bytes a cache takes, and how much context a GPU holds. `cost` says what a step takes.

Models, GPUs and conventions are in `shapes`; everything can be had from here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.cost import (
    Latency,
    Saved,
    Step,
    decoding_step,
    latency,
    recomputation_saved,
    saved,
)
from trapline.gold.kv_cache.shapes import UNITS, Gpu, ModelShape, Setting, Unit, gpus, models

__all__ = [
    "UNITS",
    "Answer",
    "Gpu",
    "Latency",
    "ModelShape",
    "Saved",
    "Setting",
    "Step",
    "Unit",
    "context_on",
    "decoding_step",
    "gpus",
    "growth",
    "latency",
    "max_context",
    "models",
    "recomputation_saved",
    "saved",
]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How many tokens each sequence can have on one GPU, and every term of that sum."""

    model: str
    gpu: str
    tokens: int
    #: Whole pages only.
    tokens_in_blocks: int
    gpu_bytes: int
    usable_bytes: int
    weight_bytes: int
    reserve_bytes: int
    budget_bytes: int
    #: What one further token takes beyond all windows.
    bytes_per_token: float
    #: What the sliding layers take once their windows are full.
    sliding_bytes: float


def max_context(
    spec: Mapping[str, int],
    gpu_bytes: float,
    *,
    utilization: float,
    weight_bytes: float,
    reserve_bytes: float,
) -> tuple[int, dict[str, float]]:
    """⌊(utilization · gpu − weights − reserve) / bytes a token⌋, never negative, and its terms.

    `spec` has num_layers, num_kv_heads, head_dim and bits; a token takes 2·L·G·D·bits/8 bytes.
    """
    sizes = [spec[name] for name in ("num_layers", "num_kv_heads", "head_dim", "bits")]
    if min(sizes) < 1:
        raise RangeError(f"the specification needs sizes of at least 1, got {dict(spec)}")
    if not 0 < utilization <= 1:
        raise RangeError(f"utilization must be in (0, 1], got {utilization}")
    if min(gpu_bytes, weight_bytes, reserve_bytes) < 0:
        raise RangeError("bytes cannot be negative")
    a_token = 2 * math.prod(sizes) / 8
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, math.floor(budget / a_token))
    return tokens, {"bytes_per_token": a_token, "budget_bytes": budget}


def context_on(model: ModelShape, gpu: Gpu, setting: Setting) -> Answer:
    """The longest context that each of `setting.sequences` sequences can have at once."""
    gpu_bytes = gpu.memory * UNITS[setting.unit]
    # Whole bytes, and rounded: in floating point 8.03 · 10⁹ · 2 lies just below itself.
    usable = round(setting.utilization * gpu_bytes)
    weights = round(model.weight_bytes(setting.weight_bits))
    reserve = round(setting.reserve_gib * 2**30)
    budget = usable - weights - reserve
    tokens = _longest(model, budget / setting.sequences, setting.kv_bits)
    layer = model.layer_bytes(setting.kv_bits)
    return Answer(
        model=model.name,
        gpu=gpu.name,
        tokens=tokens,
        tokens_in_blocks=tokens // setting.block_size * setting.block_size,
        gpu_bytes=gpu_bytes,
        usable_bytes=usable,
        weight_bytes=weights,
        reserve_bytes=reserve,
        budget_bytes=budget,
        bytes_per_token=layer * (model.layers - model.sliding_layers),
        sliding_bytes=layer * model.sliding_layers * model.window,
    )


def _longest(model: ModelShape, budget: float, kv_bits: float) -> int:
    """The largest T whose cache fits: all layers grow up to the window, then the full ones."""
    layer = model.layer_bytes(kv_bits)
    tokens = math.floor(budget / (layer * model.layers))
    if model.sliding_layers and tokens > model.window:
        full = model.layers - model.sliding_layers
        rest = budget - layer * model.sliding_layers * model.window
        tokens = math.floor(rest / (layer * full))
    return max(0, tokens)


def growth(model: ModelShape, kv_bits: float) -> Iterator[tuple[int, int]]:
    """(tokens, bytes of one sequence) for contexts of 1 Ki, 4 Ki, … up to the model's own."""
    tokens = 1024
    while tokens < model.context:
        yield tokens, math.floor(model.cache_bytes(tokens, kv_bits))
        tokens *= 4
    yield model.context, math.floor(model.cache_bytes(model.context, kv_bits))
