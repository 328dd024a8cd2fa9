"""How many bytes a cache takes, how much context a GPU holds, and what a decoding step costs.

A layer of full attention stores 2·G·D elements a token, a sliding one the same for its last W
tokens only, a latent one its compressed vector. Quantised elements bring a scale of 16 bits a token
and head.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trapline.gold.errors import RangeError

Unit = Literal["gib", "gb"]
#: A vendor's "80 GB" read as 80 · 2³⁰ or as 80 · 10⁹ bytes.
UNITS: dict[Unit, int] = {"gib": 2**30, "gb": 10**9}
SCALE_BITS = 16


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the size of a cache depends on. Parameters in billions."""

    name: str
    source: str
    parameters: float
    active: float | None = None
    layers: int
    query_heads: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    sliding_layers: int = 0
    window: int = 0
    context: int

    def layer_bytes(self, kv_bits: float) -> float:
        """Bytes a token in one layer."""
        if self.latent:
            return self.latent * kv_bits / 8
        scales = SCALE_BITS if kv_bits <= 8 else 0
        return 2 * self.kv_heads * (self.head_dim * kv_bits + scales) / 8

    def cache_bytes(self, tokens: int, kv_bits: float) -> float:
        """Bytes of one sequence of this length."""
        full = self.layers - self.sliding_layers
        positions = full * tokens + self.sliding_layers * min(tokens, self.window)
        return self.layer_bytes(kv_bits) * positions

    def weight_bytes(self, bits: float) -> float:
        return self.parameters * 1e9 * bits / 8

    def step_flops(self, tokens: int) -> float:
        """One new token over a context: two a weight, and q·k and p·v over what is cached."""
        width = self.latent or self.head_dim
        full = self.layers - self.sliding_layers
        seen = full * tokens + self.sliding_layers * min(tokens, self.window)
        return 2e9 * (self.active or self.parameters) + 4 * self.query_heads * width * seen


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Memory in the vendor's gigabytes, bandwidth in GB/s, dense 16 bit TFLOP/s."""

    name: str
    memory: int
    bandwidth: float
    tflops: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The conventions an answer depends on; every one of them is printed with it."""

    kv_bits: float = 16
    weight_bits: float = 16
    utilization: float = 0.9
    reserve_gib: float = 0.0
    unit: Unit = "gib"
    block_size: int = 16
    sequences: int = 1

    def __post_init__(self) -> None:
        if min(self.kv_bits, self.weight_bits) <= 0:
            raise RangeError("bits must be positive")
        if not 0 < self.utilization <= 1:
            raise RangeError(f"utilization must be in (0, 1], got {self.utilization}")
        if self.reserve_gib < 0:
            raise RangeError(f"the reserve cannot be negative, got {self.reserve_gib}")
        if self.unit not in UNITS:
            raise RangeError(f"unit must be gib or gb, got {self.unit!r}")
        if min(self.block_size, self.sequences) < 1:
            raise RangeError("block size and number of sequences must be at least 1")


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


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decoding step at a given context, read from memory once: a lower bound."""

    context: int
    cache_bytes: int
    milliseconds: float
    flops_per_byte: float
    memory_bound: bool


@cache
def _shapes() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())


@cache
def models() -> dict[str, ModelShape]:
    """The models of `shapes.toml` by name."""
    return {row["name"]: ModelShape(**row) for row in _shapes()["model"]}


@cache
def gpus() -> dict[str, Gpu]:
    """The GPUs of `shapes.toml` by name."""
    return {row["name"]: Gpu(**row) for row in _shapes()["gpu"]}


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
    usable = setting.utilization * gpu_bytes
    weights = model.weight_bytes(setting.weight_bits)
    reserve = setting.reserve_gib * 2**30
    budget = usable - weights - reserve
    tokens = _longest(model, budget / setting.sequences, setting.kv_bits)
    layer = model.layer_bytes(setting.kv_bits)
    return Answer(
        model=model.name,
        gpu=gpu.name,
        tokens=tokens,
        tokens_in_blocks=tokens // setting.block_size * setting.block_size,
        gpu_bytes=gpu_bytes,
        usable_bytes=math.floor(usable),
        weight_bytes=math.floor(weights),
        reserve_bytes=math.floor(reserve),
        budget_bytes=math.floor(budget),
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


def decoding_step(model: ModelShape, gpu: Gpu, setting: Setting, context: int) -> Step:
    """Weights once for the batch, each sequence's cache once; all FLOPs of the batch."""
    cached = setting.sequences * model.cache_bytes(context, setting.kv_bits)
    active = (model.active or model.parameters) * 1e9 * setting.weight_bits / 8
    moved = active + cached
    flops = setting.sequences * model.step_flops(context)
    intensity = flops / moved
    return Step(
        context=context,
        cache_bytes=math.floor(cached),
        milliseconds=max(moved / (gpu.bandwidth * 1e9), flops / (gpu.tflops * 1e12)) * 1e3,
        flops_per_byte=intensity,
        memory_bound=intensity < gpu.tflops * 1e12 / (gpu.bandwidth * 1e9),
    )


def growth(model: ModelShape, kv_bits: float) -> Iterator[tuple[int, int]]:
    """(tokens, bytes of one sequence) for contexts of 1 Ki, 4 Ki, … up to the model's own."""
    tokens = 1024
    while tokens < model.context:
        yield tokens, math.floor(model.cache_bytes(tokens, kv_bits))
        tokens *= 4
    yield model.context, math.floor(model.cache_bytes(model.context, kv_bits))


def recomputation_saved(prompt: int, new: int) -> float:
    """How many times fewer tokens go through the model with a cache than without one.

    Without a cache each new token is computed from the whole text so far; with one, the prompt goes
    through once and each new token once.
    """
    without = sum(prompt + i for i in range(new))
    return without / (prompt + new - 1)
