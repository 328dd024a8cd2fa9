"""Softmax fused with top-k: blocks of rows, never an (N, V) temporary.

Compiled C (`cpu/topk`) reads long rows on a CPU once; torch does everything else by group maxima.
Divide a row into groups of G neighbours and order the groups by their largest element, ties to the
lower group. The k best elements lie in the k best groups: each of these holds an element that beats
everything in the other groups. So one pass finds the maxima, and k·G elements are read again
instead of V.

Order (larger first, NaN largest, ties to the lower index) is one integer: the float's bits, made
monotone, above the complement of the index. No two are equal, so any selection is deterministic.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trapline.gold.arithmetic import LOG2_E
from trapline.gold.operators import operator, transformed
from trapline.gold.softmax_topk.cpu import topk as native

#: Elements of a block of rows: large enough to amortise calls, small enough for temporaries.
_BLOCK = 1 << 22
#: Columns per exponential: a tile of them stays in a core's cache.
_TILE = 16384
#: Shorter rows are left to torch. Only the length of a row decides, so that its answer does not
#: depend on the other rows.
_LEAST_COMPILED = 4096
_LOW_WORD = (1 << 32) - 1
_WORST = -(1 << 63)

_SCHEMA = (
    "softmax_topk(Tensor logits, int k, Tensor temperature) -> (Tensor, Tensor, Tensor, Tensor)"
)


class Streamed(NamedTuple):
    """Results of one pass; floats are float32, or float64 for float64 logits."""

    log_probs: Tensor  # (N, K)
    indices: Tensor  # (N, K)
    lse: Tensor  # (N,)
    row_max: Tensor  # (N,)


def softmax_topk(logits: Tensor, k: int, temperature: float | Tensor) -> Streamed:
    """The k largest logits of each row as log-probabilities, best first. Not differentiable.

    The temperature is one number, or one for each row (N,).
    """
    wide, rows = _wide(logits.dtype), logits.shape[0]
    if isinstance(temperature, Tensor):
        each = temperature.to(logits.device, wide).expand(rows)
    else:  # filled on the device: a copy cannot be captured
        each = torch.full((rows,), float(temperature), dtype=wide, device=logits.device)
    plain = type(logits) is Tensor and logits.device.type == "cpu" and not transformed()
    return Streamed(*(_compiled_or_torch if plain else topk_operator)(logits, k, each))


def every_row_has_a_softmax(row_max: Tensor) -> bool:
    """The maximum is NaN, +inf or −inf exactly when the row has a NaN or a +inf, or only −inf."""
    if row_max.numel() == 1:
        return math.isfinite(row_max.item())
    return bool(torch.isfinite(row_max).all())


def backend() -> str:
    """The CPU path for long rows, and why the faster one is not available."""
    reason = native.unavailable()
    return "compiled C" if reason is None else f"torch: {reason}"


def _compiled_or_torch(
    logits: Tensor, k: int, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    long = logits.shape[1] >= _LEAST_COMPILED and logits.dtype != torch.float64
    if logits.device.type != "cpu" or not long or native.unavailable() is not None:
        return _softmax_topk(logits, k, temperature)
    threads = torch.get_num_threads()
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    found = native.ranked(rows, k, temperature.contiguous(), threads)
    return found.log_probs, found.indices, found.lse, found.row_max


def _softmax_topk(
    logits: Tensor, k: int, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    wide = _wide(logits.dtype)
    best = logits.new_empty((rows, k), dtype=wide)
    indices = logits.new_empty((rows, k), dtype=torch.int64)
    row_max = logits.new_empty((rows, 1), dtype=wide)
    total = logits.new_empty((rows, 1), dtype=wide)  # Σ exp((x − max) / temperature)
    each = temperature[:, None]
    step = max(1, _BLOCK // vocabulary)
    for start in range(0, rows, step):
        here = slice(start, start + step)
        block = logits[here].to(wide)
        indices[here] = _ranked(block, k)
        best[here] = block.gather(1, indices[here])
        row_max[here] = block.amax(dim=1, keepdim=True)
        total[here] = _sum_of_exponentials(block, row_max[here], each[here])
    log_total = torch.log(total)
    log_probs = (best - row_max) / each - log_total
    lse = row_max / each + log_total
    return log_probs, indices, lse[:, 0].clone(), row_max[:, 0].clone()


def _sum_of_exponentials(block: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
    # A row that is all −inf has no finite maximum to subtract: −inf − (−inf) would be NaN.
    origin = torch.where(row_max == -torch.inf, torch.zeros_like(row_max), row_max)
    total = torch.zeros_like(row_max)
    room = torch.empty_like(block[:, :_TILE])
    for start in range(0, block.shape[1], _TILE):
        tile = block[:, start : start + _TILE]
        # exp2 because torch's exp is several times slower on some processors.
        powers = torch.sub(tile, origin, out=room[:, : tile.shape[1]])
        powers.mul_(LOG2_E / temperature).exp2_()
        total += powers.sum(dim=1, keepdim=True)
    return total


def _ranked(block: Tensor, k: int) -> Tensor:
    """(R, k) indices of each row's k largest, best first, ties to the lower index."""
    if block.dtype == torch.float64:  # 64 bits leave no space for an index
        return torch.sort(block, dim=1, descending=True, stable=True).indices[:, :k]
    places = _contenders(block, k)
    keys = _keys(block.gather(1, places.clamp_max(block.shape[1] - 1)), places)
    keys = keys.masked_fill(places >= block.shape[1], _WORST)
    return _LOW_WORD - (keys.topk(k, dim=1).values & _LOW_WORD)


def _contenders(block: Tensor, k: int) -> Tensor:
    """(R, C) indices that include the k largest; some may be beyond the end of the row."""
    rows, vocabulary = block.shape
    # A power of two near √(V/k), which balances the maxima and the second pass.
    group = 1 << min(6, max(3, round(math.log2(vocabulary / k) / 2)))
    if 2 * k * group > vocabulary:
        return torch.arange(vocabulary, device=block.device).expand(rows, -1)
    whole = vocabulary // group * group
    maxima = block[:, :whole].reshape(rows, -1, group).amax(dim=2)
    if whole < vocabulary:
        maxima = torch.cat((maxima, block[:, whole:].amax(dim=1, keepdim=True)), dim=1)
    number = torch.arange(maxima.shape[1], device=block.device)
    chosen = _keys(maxima, number).topk(k, dim=1).indices
    inside = torch.arange(group, device=block.device)
    return (chosen[:, :, None] * group + inside).flatten(1)


def _keys(values: Tensor, places: Tensor) -> Tensor:
    """An integer per value in the order of the values, ties to the lower place."""
    bits = (values + 0.0).view(torch.int32)  # −0 becomes +0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = torch.where(values.isnan(), torch.full_like(bits, 0x7FFFFFFF), bits)
    return (bits.to(torch.int64) << 32) | (_LOW_WORD - places)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# The torch path is composed of torch operators, so that it gives the shapes as well.
topk_operator = operator("trapline_topk", _SCHEMA, _softmax_topk)(_compiled_or_torch)
