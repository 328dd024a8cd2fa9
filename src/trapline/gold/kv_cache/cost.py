"""What decoding costs: FLOPs with and without a cache, bytes moved, and the time both allow.

Times are lower bounds: every byte is read once at the full bandwidth, every FLOP done at the peak,
and the two overlap completely.
"""

import math
from dataclasses import dataclass

import numpy as np

from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.shapes import Gpu, ModelShape, Setting

#: Every position is added up one by one.
_LONGEST = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decoding step of all sequences at a given context."""

    context: int
    cache_bytes: int
    milliseconds: float
    #: FLOPs for each byte that is read; below the GPU's own ratio, reading takes longer.
    flops_per_byte: float
    gpu_flops_per_byte: float
    memory_bound: bool
    #: How many sequences make arithmetic the bound; None if their caches outweigh any number.
    compute_bound_from: int | None


@dataclass(frozen=True, kw_only=True)
class Latency:
    """A prompt and its answer, for `setting.sequences` at once."""

    prompt: int
    new: int
    prefill_milliseconds: float
    decode_milliseconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How many times more work generation without a cache does, by four ways of counting."""

    prompt: int
    new: int
    #: Tokens that go through the model: each new one needs the whole text so far.
    tokens: float
    #: Scores of attention: n² for a text of n, against prompt² and one row for each new token.
    scores: float
    #: The same with every step charged at the final length. This is the well-known 109 × for 1024
    #: and 100: it rounds the work without a cache up.
    scores_at_final_length: float
    #: All FLOPs of this model, causal attention and windows counted as they are.
    flops: float


def decoding_step(model: ModelShape, gpu: Gpu, setting: Setting, context: int) -> Step:
    """Weights once for the batch, each sequence's cache once; all FLOPs of the batch."""
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
    """What a cache saves: the prompt goes through once, and each new token but the last once."""
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
