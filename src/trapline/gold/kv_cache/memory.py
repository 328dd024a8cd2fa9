"""How much context fits on a GPU, and what decoding costs: FLOPs, bytes, lower bounds of time.

Times assume that every byte is read once at full bandwidth, every FLOP runs at the peak rate, and
both overlap completely.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.shapes import UNITS, Gpu, ModelShape, Setting

#: Costs are summed position by position, up to this many.
_LONGEST = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How many tokens each sequence can have on one GPU, and every term of the calculation."""

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
    #: Bytes of one further token beyond all windows.
    bytes_per_token: float
    #: Bytes of the sliding layers once their windows are full.
    sliding_bytes: float


def max_context(
    spec: Mapping[str, int],
    gpu_bytes: float,
    *,
    utilization: float,
    weight_bytes: float,
    reserve_bytes: float,
) -> tuple[int, dict[str, float]]:
    """⌊(utilization · gpu − weights − reserve) / bytes a token⌋, at least 0, and its terms.

    `spec` has num_layers, num_kv_heads, head_dim and bits; one token takes 2·L·G·D·bits/8 bytes.
    """
    sizes = [spec[name] for name in ("num_layers", "num_kv_heads", "head_dim", "bits")]
    if min(sizes) < 1:
        raise RangeError(f"all sizes of the specification must be at least 1, got {dict(spec)}")
    if not 0 < utilization <= 1:
        raise RangeError(f"utilization must be in (0, 1], got {utilization}")
    if min(gpu_bytes, weight_bytes, reserve_bytes) < 0:
        given = (gpu_bytes, weight_bytes, reserve_bytes)
        raise RangeError(f"GPU, weight and reserve bytes must be at least 0, got {given}")
    a_token = 2 * math.prod(sizes) / 8
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, math.floor(budget / a_token))
    return tokens, {"bytes_per_token": a_token, "budget_bytes": budget}


def context_on(model: ModelShape, gpu: Gpu, setting: Setting) -> Answer:
    """The longest context that each of `setting.sequences` sequences can have at once."""
    gpu_bytes = gpu.memory * UNITS[setting.unit]
    # Rounded to whole bytes: in floating point 8.03 · 10⁹ · 2 lies just below the integer.
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
        if not full:
            return model.context  # beyond the window a token takes no further memory
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


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decoding step of all sequences at a given context."""

    context: int
    cache_bytes: int
    milliseconds: float
    #: FLOPs per byte read; below the GPU's own ratio, memory is the bound.
    flops_per_byte: float
    gpu_flops_per_byte: float
    memory_bound: bool
    #: From how many sequences on arithmetic is the bound; None if memory always is.
    compute_bound_from: int | None


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Times of a prompt and its answer, for `setting.sequences` at once."""

    prompt: int
    new: int
    prefill_milliseconds: float
    decode_milliseconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How many times more work generation without a cache takes, counted in four ways."""

    prompt: int
    new: int
    #: Tokens that go through the model: each new one needs the whole text so far.
    tokens: float
    #: Attention scores: n² for a text of n tokens, against prompt² and one row per new token.
    scores: float
    #: The same with every step charged at the final length, the often quoted 109 × for 1024 and
    #: 100 tokens; it overestimates the work without a cache.
    scores_at_final_length: float
    #: All FLOPs of this model, with causal attention and windows.
    flops: float


def decoding_step(model: ModelShape, gpu: Gpu, setting: Setting, context: int) -> Step:
    """Reads the weights once per batch and the cache once per sequence."""
    cached = model.cache_bytes(context, setting.kv_bits)
    weights = _active(model) * setting.weight_bits / 8
    flops = model.step_flops(context)
    ridge = gpu.tflops * 1e12 / (gpu.bandwidth * 1e9)
    moved = weights + setting.sequences * cached
    intensity = setting.sequences * flops / moved
    # B · flops ≥ ridge · (weights + B · cached)
    margin = flops - ridge * cached
    return Step(
        context=context,
        cache_bytes=math.floor(setting.sequences * cached),
        milliseconds=_milliseconds(gpu, moved, setting.sequences * flops),
        flops_per_byte=intensity,
        gpu_flops_per_byte=ridge,
        memory_bound=intensity < ridge,
        compute_bound_from=math.ceil(ridge * weights / margin) if margin > 0 else None,
    )


def latency(model: ModelShape, gpu: Gpu, setting: Setting, prompt: int, new: int) -> Latency:
    """The prompt in one pass, then one step for each further token."""
    _check(prompt, new)
    flops = setting.sequences * float(_step_flops(model, np.arange(1, prompt + 1)).sum())
    written = setting.sequences * model.cache_bytes(prompt, setting.kv_bits)
    prefill = _milliseconds(gpu, _active(model) * setting.weight_bits / 8 + written, flops)
    decode = sum(
        decoding_step(model, gpu, setting, context).milliseconds
        for context in range(prompt + 1, prompt + new)
    )
    return Latency(
        prompt=prompt,
        new=new,
        prefill_milliseconds=prefill,
        decode_milliseconds=decode,
        tokens_per_second=1e3 * setting.sequences * new / (prefill + decode),
    )


def recomputation_saved(prompt: int, new: int) -> float:
    """How many times fewer tokens go through any model with a cache than without one.

    Without a cache each new token is computed from the whole text so far; with one, the prompt goes
    through once and each new token but the last once.
    """
    _check(prompt, new)
    return sum(prompt + i for i in range(new)) / (prompt + new - 1)


def saved(model: ModelShape, prompt: int, new: int) -> Saved:
    """The work saved by a cache, which computes each position once."""
    _check(prompt, new)
    lengths = np.arange(prompt, prompt + new, dtype=np.float64)
    final = float(prompt + new)
    once = _step_flops(model, np.arange(1, prompt + new))  # each position, computed once
    without = np.cumsum(once)[prompt - 1 :].sum()
    return Saved(
        prompt=prompt,
        new=new,
        tokens=recomputation_saved(prompt, new),
        scores=float((lengths**2).sum() / (prompt**2 + lengths[1:].sum())),
        scores_at_final_length=float(new * final**2 / (prompt**2 + (lengths + 1).sum())),
        flops=float(without / once.sum()),
    )


def _step_flops(model: ModelShape, contexts: np.ndarray) -> np.ndarray:
    """`ModelShape.step_flops` for many contexts."""
    return np.array([model.step_flops(int(context)) for context in contexts])


def _active(model: ModelShape) -> float:
    return (model.active or model.parameters) * 1e9


def _milliseconds(gpu: Gpu, moved: float, flops: float) -> float:
    return max(moved / (gpu.bandwidth * 1e9), flops / (gpu.tflops * 1e12)) * 1e3


def _check(prompt: int, new: int) -> None:
    if prompt < 1 or new < 1:
        raise RangeError(f"prompt and new tokens must be at least 1, got {prompt} and {new}")
    if prompt + new > _LONGEST:
        raise RangeError(f"{prompt} and {new} tokens: costs are added up to {_LONGEST:,} positions")


def plot_growth(model: ModelShape, out: str | Path) -> None:
    """Plots the bytes of one sequence at 16, 8 and 4 bits beside the weights; needs matplotlib."""
    from matplotlib.figure import Figure

    tokens = np.unique(np.geomspace(64, model.context, 200).astype(int))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for bits, style in ((16, "-"), (8, "--"), (4, ":")):
        sizes = [model.cache_bytes(int(n), bits) / 2**30 for n in tokens]
        axes.loglog(tokens, sizes, style, label=f"cache, {bits} bits")
    axes.axhline(model.weight_bytes(16) / 2**30, color="gray", label="weights, 16 bits")
    axes.set(xlabel="tokens of one sequence", ylabel="GiB", title=f"KV cache of {model.name}")
    axes.legend()
    figure.savefig(out, dpi=120)
