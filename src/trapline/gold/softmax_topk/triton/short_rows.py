# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of rows that fit into registers: one program per row, one launch."""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import (
    emit,
    emit_summary,
    group_maxima,
    key_of,
    kth_of,
    larger,
    logit_of,
    origin_of,
    rank,
    rank_in_buckets,
    temperature_of,
    threshold,
    value_of,
    wait,
)
from trapline.gold.softmax_topk.triton.shared_memory import (
    add,
    cells_for,
    count_in,
    emptied,
    pair,
    room_for,
)


@triton.jit
def whole_row(logits, column, V, EVEN: tl.constexpr):
    """The row, and −inf beyond its end: at higher columns, so it loses every tie."""
    if EVEN:
        x = tl.load(logits + column)
    else:
        x = tl.load(logits + column, mask=column < V, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def sum_and_first(a, i, b, j):
    return a + b, tl.minimum(i, j)


@launched
@triton.jit(do_not_specialize=["log"])
def best_kernel(
    logits, temperatures, temperature, values, indices, lse, row_max,
    V, logits_row, log,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K = 1: most of the work stays within threads; two reductions over threads remain."""
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
    tl.store(values + row, value_of(peak, peak, total, temperature, log))
    tl.store(indices + row, first.to(tl.int64))
    emit_summary(lse, row_max, row, peak, total, temperature)


@triton.jit
def keep_exactly(
    room, x, column, K, CAP: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Leaves exactly the K best in the room; returns a lower bound of them."""
    key = key_of(x, column, SHIFT)
    kth = kth_of(key, K, SHIFT)
    emptied(room)
    add(room, x, tl.where(key >= kth, column, -1), float("-inf"), CAP, THREADS)
    tl.debug_barrier()
    return logit_of(kth, SHIFT)


@launched
@triton.jit(do_not_specialize=["V", "K", "logits_row", "log"])
def short_kernel(
    logits, temperatures, temperature, rooms, values, indices, lse, row_max,
    V, K, logits_row, log,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr,
    SHIFT: tl.constexpr, RANKED: tl.constexpr, EVEN: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Keeps the logits that are not below a threshold, and ranks them.

    The threshold comes from the maxima of GROUPS groups of threads: with 2K groups about 1.4 K
    logits remain, give or take a tenth. If ties leave too many, bisection selects exactly.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    logits += row * logits_row
    room = room_for(rooms, row * (3 * CAP + 2), CAP)
    if not RANKED:
        cells = cells_for(rooms, row * (3 * CAP + 2) + 2 * CAP + 2, CAP)
    tl.debug_barrier()
    wait(PDL)
    x = whole_row(logits, column, V, EVEN)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    held = tl.reshape(x, [BLOCK // THREADS, THREADS])
    each = tl.reduce(held, 0, larger)
    maxima = group_maxima(each, GROUPS)
    if RANKED:
        least = threshold(maxima, K)
        add(room, x, column, least, CAP, THREADS)
    # The sum of exponentials overlaps with other threads' additions to the room.
    share = tl.sum(tl.exp2((held - origin_of(each)[None, :]) * scale), 0)
    peak = tl.reduce(maxima, 0, larger)
    total = tl.sum(share * tl.exp2((each - origin_of(peak)) * scale), 0)
    tl.debug_barrier()
    kept = count_in(room)
    if RANKED:
        if kept > CAP:
            keep_exactly(room, x, column, K, CAP, THREADS, SHIFT)
            kept = K
    else:
        least = keep_exactly(room, x, column, K, CAP, THREADS, SHIFT)
        kept = K
    slot = tl.arange(0, CAP)
    kept_x, kept_column = pair(room, slot)
    key = key_of(kept_x.to(tl.float32, bitcast=True), kept_column, SHIFT)
    key = tl.where(slot < kept, key, 0)
    if RANKED:
        place = rank(key)
    else:
        tl.debug_barrier()
        place = rank_in_buckets(room, cells, key, slot < kept, peak, least, V, CAP, SHIFT)
    place = tl.where(slot < kept, place, K)
    emit(key, place, peak, total, temperature, row, values, indices, K, log, SHIFT)
    emit_summary(lse, row_max, row, peak, total, temperature)
