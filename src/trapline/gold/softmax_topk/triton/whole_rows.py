# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of thousands of rows: one program reads a row once and selects from its group maxima.

It is both kernels of `long_rows` in one. The maxima stay in shared memory, and while one program
selects, others on the same multiprocessor read.
"""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import (
    emit,
    emit_summary,
    key_of,
    larger,
    origin_of,
    rank_in_buckets,
    temperature_of,
    wait,
)
from trapline.gold.softmax_topk.triton.long_rows import added_tile, edge, keep_best, list_groups
from trapline.gold.softmax_topk.triton.shared_memory import (
    cell,
    cells_for,
    pair,
    room_for,
    set_cell,
)


@triton.jit
def kept_tile(
    x, maxima, start, peak, total, scale,
    G: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds one tile, and keeps the maxima of its groups."""
    best, peak, total = added_tile(x, peak, total, scale, G, BLOCK, THREADS, WIDTH)
    set_cell(maxima, start // G + tl.arange(0, BLOCK // G), best.to(tl.int32, bitcast=True))
    return peak, total


@triton.jit
def read_row(
    base, skip, end, maxima, scale,
    G: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Every thread's largest logit and its sum of powers relative to that; fills `maxima`."""
    peak = tl.full([THREADS], float("-inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    begin = skip * 0
    if skip > 0:
        x = edge(base, tl.arange(0, BLOCK), skip, end, WIDTH)
        peak, total = kept_tile(x, maxima, 0, peak, total, scale, G, BLOCK, THREADS, WIDTH)
        begin += BLOCK
    whole = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    for start in range(begin, whole, BLOCK):
        x = tl.load(base + start + tl.arange(0, BLOCK)).to(tl.float32)
        peak, total = kept_tile(x, maxima, start, peak, total, scale, G, BLOCK, THREADS, WIDTH)
    if whole < end:
        x = edge(base, whole + tl.arange(0, BLOCK), skip, end, WIDTH)
        peak, total = kept_tile(x, maxima, whole, peak, total, scale, G, BLOCK, THREADS, WIDTH)
    return peak, total


@launched
@triton.jit(do_not_specialize=["V", "K", "logits_row", "log"])
def whole_kernel(
    logits, temperatures, temperature, rooms, values, indices, lse, row_max,
    V, K, logits_row, log,
    G: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
    THREADS: tl.constexpr, SUPER: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The K best of one row, K so small that counting gives the threshold."""
    row = tl.program_id(0).to(tl.int64)
    skip = ((row * logits_row) % WIDTH).to(tl.int32)
    base = logits + (row * logits_row // WIDTH) * WIDTH
    at = row * (2 * LIST + 3 * CAP + GROUPS_BLOCK + 4)
    listed, room = room_for(rooms, at, LIST), room_for(rooms, at + 2 * LIST + 2, CAP)
    cells = cells_for(rooms, at + 2 * LIST + 2 * CAP + 4, CAP)
    maxima = cells_for(rooms, at + 2 * LIST + 3 * CAP + 4, GROUPS_BLOCK)
    tl.debug_barrier()
    wait(PDL)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    each, share = read_row(base, skip, V + skip, maxima, scale, G, BLOCK, THREADS, WIDTH)
    peak = tl.reduce(each, 0, larger)
    total = tl.sum(share * tl.exp2((each - origin_of(peak)) * scale), 0)
    tl.debug_barrier()
    number = tl.arange(0, GROUPS_BLOCK)
    here = number < tl.cdiv(V + skip, G)
    best = tl.where(here, cell(maxima, number).to(tl.float32, bitcast=True), float("-inf"))
    least = list_groups(best, here, listed, K, THREADS, SUPER, LIST, SHIFT, True)
    kept = keep_best(
        base, listed, room, least, skip, V, K, G, THREADS, TILE, CAP, WIDTH, SHIFT
    )  # fmt: skip
    slot = tl.arange(0, CAP)
    x, column = pair(room, slot)
    key = key_of(x.to(tl.float32, bitcast=True), column, SHIFT)
    key = tl.where(slot < kept, key, 0)
    tl.debug_barrier()
    place = rank_in_buckets(room, cells, key, slot < kept, peak, least, V, CAP, SHIFT)
    place = tl.where(slot < kept, place, K)
    emit(key, place, peak, total, temperature, row, values, indices, K, log, SHIFT)
    emit_summary(lse, row_max, row, peak, total, temperature)
