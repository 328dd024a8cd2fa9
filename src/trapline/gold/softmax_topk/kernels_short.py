# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of rows that fit into registers: one program a row, one launch."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.softmax_topk.kernels_order import (
    LOG2_E,
    both_added,
    emit,
    emit_summary,
    exactly,
    group_maxima,
    key_of,
    larger,
    origin_of,
    places,
    rank,
    temperature_of,
    threshold,
    value_of,
)


@triton.jit
def sum_and_first(a, i, b, j):
    return a + b, tl.minimum(i, j)


@triton.jit(do_not_specialize=["log"])
def best_kernel(
    logits, temperatures, temperature, values, indices, lse, row_max,
    V, logits_row, log,
    BLOCK: tl.constexpr, PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K = 1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * logits_row + column, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    peak = tl.reduce(x, 0, larger)
    powers = tl.exp2((x - origin_of(peak)) * (LOG2_E / temperature))
    is_best = inside & ((x >= peak) | (x != x))
    total, first = tl.reduce((powers, tl.where(is_best, column, BLOCK)), 0, sum_and_first)
    tl.store(values + row, value_of(peak, peak, total, temperature, log))
    tl.store(indices + row, first.to(tl.int64))
    emit_summary(lse, row_max, row, peak, total, temperature)


@triton.jit(do_not_specialize=["V", "K", "logits_row", "log"])
def short_kernel(
    logits, temperatures, temperature, kept_logits, kept_columns, values, indices, lse, row_max,
    V, K, logits_row, log,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, GROUPS: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr, PER_ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A threshold from group maxima leaves a few more than K; where it leaves too many, bisection.

    A group is what a few threads hold. With GROUPS ≥ 2K and no ties about 1.4 K logits remain.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    kept_logits += row * CAP
    kept_columns += row * CAP
    slot = tl.arange(0, CAP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * logits_row + column, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    held = tl.reshape(x, [BLOCK // THREADS, THREADS])
    each = tl.reduce(held, 0, larger)
    if RANKED:
        chosen = inside & ((x < threshold(group_maxima(each, GROUPS), K)) == 0)
    else:
        chosen = exactly(x, column, inside, K, SHIFT)
    place, mine = places(chosen, THREADS)
    tl.store(kept_logits + place, x, mask=chosen & (place < CAP))
    tl.store(kept_columns + place, column, mask=chosen & (place < CAP))
    share = tl.sum(tl.exp2((held - origin_of(each)[None, :]) * scale), 0)
    tl.debug_barrier()
    kept_x = tl.load(kept_logits + slot)
    kept_column = tl.load(kept_columns + slot)
    # While these are on their way:
    peak = tl.reduce(each, 0, larger)
    share *= tl.exp2((each - origin_of(peak)) * scale)
    total, count = tl.reduce((share, mine), 0, both_added)
    if count > CAP:
        tl.debug_barrier()
        chosen = exactly(x, column, inside, K, SHIFT)
        place, mine = places(chosen, THREADS)
        tl.store(kept_logits + place, x, mask=chosen)
        tl.store(kept_columns + place, column, mask=chosen)
        count = K
        tl.debug_barrier()
        kept_x = tl.load(kept_logits + slot)
        kept_column = tl.load(kept_columns + slot)
    key = tl.where(slot < count, key_of(kept_x, kept_column, SHIFT), 0)
    if RANKED:
        place = tl.where(slot < count, rank(key), K)
    else:
        key = tl.sort(key, descending=True)
        place = slot
    emit(key, place, peak, total, temperature, row, values, indices, K, log, SHIFT)
    emit_summary(lse, row_max, row, peak, total, temperature)
