# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of rows that fit into registers: one program a row, one launch."""

import triton
import triton.language as tl

from trapline.gold.softmax_topk.kernels_order import (
    LOG2_E,
    both_added,
    emit,
    emit_summary,
    group_maxima,
    key_of,
    kth_of,
    larger,
    make_way,
    origin_of,
    places,
    rank,
    temperature_of,
    threshold,
    value_of,
    wait,
)


@triton.jit
def whole_row(logits, column, V, EVEN: tl.constexpr):
    """−inf beyond the end: at a higher column than any logit, so it loses every tie."""
    if EVEN:
        x = tl.load(logits + column)
    else:
        x = tl.load(logits + column, mask=column < V, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def sum_and_first(a, i, b, j):
    return a + b, tl.minimum(i, j)


@triton.jit(do_not_specialize=["log"])
def best_kernel(
    logits, temperatures, temperature, values, indices, lse, row_max,
    V, logits_row, log,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K = 1. All that can be is done within threads; two sums over them are left."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wait(PDL)
    x = whole_row(logits + row * logits_row, column, V, EVEN)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    held = tl.reshape(x, [BLOCK // (THREADS * WIDTH), THREADS, WIDTH])
    where = tl.reshape(column, [BLOCK // (THREADS * WIDTH), THREADS, WIDTH])
    each = tl.reduce(tl.reduce(held, 2, larger), 0, larger)
    top = each[None, :, None]
    share = tl.sum(tl.sum(tl.exp2((held - origin_of(top)) * scale), 2), 0)
    is_best = (held >= top) | (held != held)
    first = tl.min(tl.min(tl.where(is_best, where, BLOCK), 2), 0)
    peak = tl.reduce(each, 0, larger)
    share *= tl.exp2((each - origin_of(peak)) * scale)
    first = tl.where((each >= peak) | (each != each), first, BLOCK)
    total, first = tl.reduce((share, first), 0, sum_and_first)
    make_way(PDL)
    tl.store(values + row, value_of(peak, peak, total, temperature, log))
    tl.store(indices + row, first.to(tl.int64))
    emit_summary(lse, row_max, row, peak, total, temperature)


@triton.jit
def keep_exactly(
    x, column, kept_logits, kept_columns, K, THREADS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Writes the K best of all, in no order."""
    key = key_of(x, column, SHIFT)
    chosen = key >= kth_of(key, K, SHIFT)
    place, _ = places(chosen, THREADS)
    tl.store(kept_logits + place, x, mask=chosen)
    tl.store(kept_columns + place, column, mask=chosen)


@triton.jit(do_not_specialize=["V", "K", "logits_row", "log"])
def short_kernel(
    logits, temperatures, temperature, lists, kept_logits, kept_columns,
    values, indices, lse, row_max,
    V, K, logits_row, log,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, GROUPS: tl.constexpr, LIST: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr, EVEN: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Threads that hold anything at or above a threshold are listed, and their logits looked at.

    The threshold comes from the maxima of GROUPS groups of threads: of 2K groups about 1.4 K
    logits remain, with a spread of a tenth of that. Where ties let too many remain, bisection.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    logits += row * logits_row
    lists += row * LIST
    kept_logits += row * CAP
    kept_columns += row * CAP
    slot = tl.arange(0, CAP)
    wait(PDL)
    x = whole_row(logits, column, V, EVEN)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    REPEATS: tl.constexpr = BLOCK // THREADS
    held = tl.reshape(x, [REPEATS, THREADS])
    each = tl.reduce(held, 0, larger)
    if RANKED:
        least = threshold(group_maxima(each, GROUPS), K)
        taken = (each < least) == 0
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(lists + place, tl.arange(0, THREADS), mask=taken & (place < LIST))
    else:
        taken = each == each
    # The sum of exponentials fills the time that the list takes to memory and back.
    share = tl.sum(tl.exp2((held - origin_of(each)[None, :]) * scale), 0)
    tl.debug_barrier()
    if RANKED:
        # Beyond the end of the list lies anything; it is made a thread, and ignored later.
        thread = tl.load(lists + tl.arange(0, LIST)) & (THREADS - 1)
    peak = tl.reduce(each, 0, larger)
    share *= tl.exp2((each - origin_of(peak)) * scale)
    total, count = tl.reduce((share, taken.to(tl.int32)), 0, both_added)
    kept = K
    if RANKED:
        where = thread[:, None] + THREADS * tl.arange(0, REPEATS)[None, :]
        where = tl.reshape(where, [LIST * REPEATS])
        again = tl.load(logits + where, mask=where < V, other=float("-inf")).to(tl.float32)
        listed = tl.arange(0, LIST * REPEATS) // REPEATS
        chosen = (listed < count) & (where < V) & ((again < least) == 0)
        place, mine = places(chosen, THREADS)
        fits = chosen & (place < CAP)
        tl.store(kept_logits + place, again, mask=fits)
        tl.store(kept_columns + place, where, mask=fits)
        tl.debug_barrier()
        kept_x, kept_column = tl.load(kept_logits + slot), tl.load(kept_columns + slot)
        kept = tl.sum(mine, 0)
        if (count > LIST) | (kept > CAP):
            tl.debug_barrier()
            keep_exactly(x, column, kept_logits, kept_columns, K, THREADS, SHIFT)
            tl.debug_barrier()
            kept_x, kept_column = tl.load(kept_logits + slot), tl.load(kept_columns + slot)
            kept = K
    else:
        keep_exactly(x, column, kept_logits, kept_columns, K, THREADS, SHIFT)
        tl.debug_barrier()
        kept_x, kept_column = tl.load(kept_logits + slot), tl.load(kept_columns + slot)
    key = tl.where(slot < kept, key_of(kept_x, kept_column, SHIFT), 0)
    if RANKED:
        place = tl.where(slot < kept, rank(key), K)
    else:
        key = tl.sort(key, descending=True)
        place = slot
    make_way(PDL)
    emit(key, place, peak, total, temperature, row, values, indices, K, log, SHIFT)
    emit_summary(lse, row_max, row, peak, total, temperature)
