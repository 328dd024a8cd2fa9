# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Softmax fused with top-k in Triton: the logits are read once, k·G of them a second time.

Short rows fit into registers: one kernel. Of longer ones a first kernel leaves the maximum of every
group of G neighbours and the partial softmax sums of each split; a second one finds the k best
groups, looks into them, and emits. Why k groups are enough: `fast`. The k-th largest of many is
found by bisection on the bits of an unsigned integer that orders as the floats do: as many rounds
of counting as the dtype has bits, whatever the distribution, and no sorting of losers. Elements
that tie with the k-th are taken from the left, so a tie goes to the lower index.

No atomics and no host synchronisation: deterministic, and capturable in a CUDA graph.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.kernels_device import processors
from trapline.gold.softmax_topk import fast

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
KERNELS = "trapline_topk_kernels"
#: A row of at most this many logits is held by one program.
SHORT = 16384
#: Of a longer one a program has this many in flight.
BLOCK = 4096
#: The most group maxima, or elements under second look, that one program holds.
HELD = 65536
MOST = 1024


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ordered(x, SHIFT: tl.constexpr):
    """Unsigned integers in the order of the floats, 0 below all of them; −0 is +0, NaN largest.

    The low SHIFT bits say nothing: a 16-bit float has no use for them.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return (bits.to(tl.uint32, bitcast=True) ^ 0x80000000) >> SHIFT


@triton.jit
def first_k(order, K, SHIFT: tl.constexpr):
    """True for the K largest, ties from the left."""
    kth = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 1 << (31 - SHIFT), tl.uint32)
    for _ in range(32 - SHIFT):
        enough = tl.sum((order >= (kth | bit)).to(tl.int32), 0) >= K
        kth = tl.where(enough, kth | bit, kth)
        bit = bit >> 1
    above = order > kth
    tied = order == kth
    wanted = K - tl.sum(above.to(tl.int32), 0)
    return above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= wanted))


@triton.jit
def keep(kept, values, chosen):
    """Writes the chosen values one after the other, and waits until the whole program has."""
    tl.store(kept + tl.cumsum(chosen.to(tl.int32), 0) - 1, values, mask=chosen)
    tl.debug_barrier()


@triton.jit
def origin_of(peak):
    """What is subtracted: 0 for a row of nothing but −inf, where −inf − (−inf) would be NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def emit(
    logits, kept, row, peak, total, temperature, log_probs, indices, lse, row_max,
    K, logits_row, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sorts the K kept columns by logit and writes them with their log-probabilities."""
    place = tl.arange(0, K_BLOCK)
    column = tl.load(kept + place, mask=place < K, other=0)
    x = tl.load(logits + row * logits_row + column, mask=place < K, other=0.0).to(tl.float32)
    high = ordered(x, 0).to(tl.int64) - 2147483648
    key = (high << 32) | (2147483647 - column.to(tl.int64))
    key = tl.sort(tl.where(place < K, key, -9223372036854775807), descending=True)
    column = 2147483647 - (key & 0x7FFFFFFF)
    column = tl.where(place < K, column, 0)
    x = tl.load(logits + row * logits_row + column, mask=place < K, other=0.0).to(tl.float32)
    log_total = tl.log2(total) * LN_2
    out = row * K + place
    tl.store(log_probs + out, (x - peak) / temperature - log_total, mask=place < K)
    tl.store(indices + out, column, mask=place < K)
    tl.store(lse + row, peak / temperature + log_total)
    tl.store(row_max + row, peak)


@triton.jit
def short_kernel(
    logits, temperatures, kept, log_probs, indices, lse, row_max,
    V, K, logits_row,
    BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    x = tl.load(logits + row * logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    peak = tl.reduce(x, 0, larger)
    total = tl.sum(tl.exp2((x - origin_of(peak)) * (LOG2_E / temperature)), 0)
    chosen = first_k(tl.where(inside, ordered(x, SHIFT), 0), K, SHIFT)
    kept += row * K_BLOCK
    keep(kept, column, chosen)
    emit(
        logits, kept, row, peak, total, temperature, log_probs, indices, lse, row_max,
        K, logits_row, K_BLOCK,
    )  # fmt: skip


@triton.jit
def stream_kernel(
    logits, temperatures, maxima, peaks, totals,
    V, logits_row, groups, chunk, splits,
    G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The group maxima of one split of a row, and its share of the softmax sum."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    scale = LOG2_E / tl.load(temperatures + row)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    begin = split * chunk
    for start in range(begin, tl.minimum(begin + chunk, V), BLOCK):
        column = start + tl.arange(0, BLOCK)
        places = logits + row * logits_row + column
        x = tl.load(places, mask=column < V, other=float("-inf")).to(tl.float32)
        best = tl.reduce(tl.reshape(x, [BLOCK // G, G]), 1, larger)
        number = start // G + tl.arange(0, BLOCK // G)
        tl.store(maxima + row * groups + number, best, mask=number < groups)
        new_peak = larger(peak, tl.reduce(best, 0, larger))
        origin = origin_of(new_peak)
        total *= tl.exp2((peak - origin) * scale)
        total += tl.sum(tl.exp2((x - origin) * scale), 0)
        peak = new_peak
    one = tl.arange(0, 1)
    tl.store(peaks + row * splits + split + one, peak)
    tl.store(totals + row * splits + split + one, total)


@triton.jit
def select_kernel(
    logits, temperatures, maxima, peaks, totals, kept, log_probs, indices, lse, row_max,
    V, K, logits_row, groups, splits,
    G: tl.constexpr, GROUPS_BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The K best of one row from its group maxima."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    split = tl.arange(0, SPLITS_BLOCK)
    part = tl.load(peaks + row * splits + split, mask=split < splits, other=float("-inf"))
    share = tl.load(totals + row * splits + split, mask=split < splits, other=0.0)
    peak = tl.reduce(part, 0, larger)
    total = tl.sum(share * tl.exp2((part - origin_of(peak)) * (LOG2_E / temperature)), 0)

    kept += row * K_BLOCK
    number = tl.arange(0, GROUPS_BLOCK)
    best = tl.load(maxima + row * groups + number, mask=number < groups, other=0.0)
    order = tl.where(number < groups, ordered(best, SHIFT), 0)
    keep(kept, number, first_k(order, K, SHIFT))

    place = tl.arange(0, K_BLOCK)
    group = tl.load(kept + place, mask=place < K, other=0)
    column = group[:, None] * G + tl.arange(0, G)[None, :]
    inside = (place[:, None] < K) & (column < V)
    x = tl.load(logits + row * logits_row + column, mask=inside, other=0.0).to(tl.float32)
    order = tl.reshape(tl.where(inside, ordered(x, SHIFT), 0), [K_BLOCK * G])
    chosen = first_k(order, K, SHIFT)
    tl.debug_barrier()  # everybody has read the groups that are overwritten now
    keep(kept, tl.reshape(column, [K_BLOCK * G]), chosen)
    emit(
        logits, kept, row, peak, total, temperature, log_probs, indices, lse, row_max,
        K, logits_row, K_BLOCK,
    )  # fmt: skip


class Plan(NamedTuple):
    """How long rows are cut."""

    group: int  # neighbours whose maximum is kept
    chunk: int  # logits of a split
    splits: int


def plan_of(rows: int, vocabulary: int, k: int, processors: int) -> Plan:
    """Groups of about √(V/k); few rows are split until every processor has work for two."""
    group = 1 << min(7, max(2, round(math.log2(vocabulary / k) / 2)))
    tiles = triton.cdiv(vocabulary, BLOCK)
    splits = max(1, min(tiles, triton.cdiv(2 * processors, max(rows, 1))))
    chunk = triton.cdiv(tiles, splits) * BLOCK
    return Plan(group, chunk, triton.cdiv(vocabulary, chunk))


def _softmax_topk(
    logits: Tensor, k: int, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    require(logits, k)
    answers = _shapes(logits, k, temperature)
    x = logits if logits.stride(1) == 1 or vocabulary == 1 else logits.contiguous()
    shift = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[x.dtype]
    k_block = max(2, triton.next_power_of_2(k))
    kept = x.new_empty((rows, k_block), dtype=torch.int32)
    each = temperature.contiguous()
    if rows and vocabulary <= SHORT:
        block = max(2, triton.next_power_of_2(vocabulary))
        short_kernel[(rows,)](
            *(x, each, kept, *answers, vocabulary, k, x.stride(0)),
            BLOCK=block,
            K_BLOCK=k_block,
            SHIFT=shift,
            num_warps=warps_for(block),
        )
    elif rows:
        _long_rows(x, k, each, kept, answers, k_block, shift)
    return answers


def _long_rows(
    x: Tensor,
    k: int,
    each: Tensor,
    kept: Tensor,
    answers: tuple[Tensor, ...],
    k_block: int,
    shift: int,
) -> None:
    rows, vocabulary = x.shape
    plan = plan_of(rows, vocabulary, k, processors(x))
    groups = triton.cdiv(vocabulary, plan.group)
    groups_block = triton.next_power_of_2(groups)
    if max(groups_block, k_block * plan.group) > HELD:
        raise RangeError(f"the kernels do not take k = {k} of {vocabulary}: together too large")
    maxima = x.new_empty((rows, groups), dtype=torch.float32)
    peaks, totals = x.new_empty((2, rows, plan.splits), dtype=torch.float32)
    stream_kernel[(rows * plan.splits,)](
        *(x, each, maxima, peaks, totals),
        *(vocabulary, x.stride(0), groups, plan.chunk, plan.splits),
        G=plan.group,
        BLOCK=BLOCK,
        num_warps=4,
    )
    select_kernel[(rows,)](
        *(x, each, maxima, peaks, totals, kept, *answers),
        *(vocabulary, k, x.stride(0), groups, plan.splits),
        G=plan.group,
        GROUPS_BLOCK=groups_block,
        SPLITS_BLOCK=triton.next_power_of_2(plan.splits),
        K_BLOCK=k_block,
        SHIFT=shift,
        num_warps=warps_for(max(groups_block, k_block * plan.group)),
    )


def warps_for(elements: int) -> int:
    """A thread holds up to 32 elements, 64 where there are no more threads."""
    return max(1, min(32, elements // 1024))


def require(logits: Tensor, k: int) -> None:
    """What the kernels take."""
    if logits.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {logits.dtype}")
    if k > MOST:
        raise RangeError(f"the kernels take k up to {MOST}, not {k}")


def _shapes(logits: Tensor, k: int, _temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows, k), dtype=torch.float32),
        logits.new_empty((rows, k), dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
    )


_LIBRARY = fast.define(KERNELS)
_LIBRARY.impl("softmax_topk", _softmax_topk, "CUDA")
_LIBRARY.impl("softmax_topk", _shapes, "Meta")
