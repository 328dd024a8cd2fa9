# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Answers in their order from the candidates in a room: ranks of all at once, or a counting sort.

Up to a few hundred candidates fit into registers and are ranked at once, however few there are.
More are sorted by as many steps as there are candidates.
"""

import triton
import triton.language as tl

from trapline.gold.softmax_topk.triton.keys import (
    bucket_of,
    column_of,
    emit,
    joined,
    key_of,
    logit_of,
    order_of,
    rank_in_buckets,
    steps_below,
    value_of,
    words,
)
from trapline.gold.softmax_topk.triton.shared_memory import (
    accumulated,
    cell,
    counted_up,
    larger_in_slice,
    pair,
    put,
    set_cell,
    space,
)


@triton.jit
def emit_by_rank(
    room, cells, kept, peak, least, V, total, temperature, row, values, indices, K, log,
    CAP: tl.constexpr, BUCKETS: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Writes the K best of the `kept` candidates in a room, CAP at most; BUCKETS cells are 0.

    IN_ORDER: they pass through the room, so that neighbours write neighbours.
    """
    slot = tl.arange(0, CAP)
    x, column = pair(room, slot)
    key = key_of(x.to(tl.float32, bitcast=True), column, SHIFT)
    key = tl.where(slot < kept, key, 0)
    tl.debug_barrier()
    PACK: tl.constexpr = min(4, CAP // THREADS)
    place = rank_in_buckets(room, cells, key, slot < kept, peak, least, V, BUCKETS, SHIFT, PACK)
    place = tl.where(slot < kept, place, K)
    if IN_ORDER:
        tl.debug_barrier()
        upper, lower = words(key)
        put(room, place, upper, lower, place < K)
        tl.debug_barrier()
        place = tl.arange(0, max(CAP // 2, THREADS))
        upper, lower = pair(room, place)
        key = joined(upper, lower)
    emit(key, place, peak, total, temperature, row, values, indices, K, log, SHIFT)


@triton.jit
def space_to_sort(rooms, at, CAP: tl.constexpr, NARROW: tl.constexpr):
    """Space for CAP keys of `emit_sorted`; 2 · CAP + 2 words of the interpreter's memory."""
    return space(rooms, at, 4 * CAP if NARROW else 8 * CAP + 8)


@triton.jit
def spare_bits(V):
    """By how many bits columns below V ≤ 2^16 can be shifted to the left and stay below 2^16."""
    return (16 - (((V - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126)).to(tl.uint32)


@triton.jit
def sort_key(x, column, V, SHIFT: tl.constexpr, NARROW: tl.constexpr):
    """`key_of`, or NARROW in 32 bits, as int32: those of a bf16 logit above those of its column.

    The column has the upper bits of its half, so that the whole is a `fine_order` too.
    """
    if NARROW:
        after = (V - 1 - column).to(tl.uint32) << spare_bits(V)
        key = (order_of(x, SHIFT) | (after & 0xFFFF)).to(tl.int32, bitcast=True)
    else:
        key = key_of(x, column, SHIFT)
    return key


@triton.jit
def logit_and_column(key, V, SHIFT: tl.constexpr, NARROW: tl.constexpr):
    """What `sort_key` was made of."""
    if NARROW:
        bits = key.to(tl.uint32, bitcast=True)
        x = logit_of((bits & 0xFFFF0000).to(tl.uint64) << 32, SHIFT)
        after = (bits & 0xFFFF) >> spare_bits(V)
        column = (V - 1 - after.to(tl.int32)).to(tl.int64)
    else:
        x = logit_of(key, SHIFT)
        column = column_of(key)
    return x, column


@triton.jit
def sort_bucket(
    key, peak, least, V, BUCKETS: tl.constexpr, SHIFT: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    if NARROW:
        bucket = steps_below(key.to(tl.uint32, bitcast=True), peak, least, BUCKETS, SHIFT)
    else:
        bucket = bucket_of(key, peak, least, V, BUCKETS, SHIFT)
    return bucket


@triton.jit
def put_key(room, slot, key, chosen, NARROW: tl.constexpr):
    """Writes keys into slots of a room, NARROW ones into both words."""
    if NARROW:
        put(room, slot, key, key, chosen)
    else:
        upper, lower = words(key)
        put(room, slot, lower, upper, chosen)


@triton.jit
def key_in(room, slot, NARROW: tl.constexpr):
    lower, upper = pair(room, slot)
    return lower if NARROW else joined(upper, lower)


@triton.jit
def emit_sorted(
    room, other, cells, kept, peak, least, V, total, temperature, row, values, indices, K, log,
    CAP: tl.constexpr, BUCKETS: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Writes the K best of the `kept` candidates in a room, CAP at most, by a counting sort.

    BUCKETS cells are 0; `other` is `space_to_sort`. The order of keys within a bucket is up to the
    hardware, but not the place of a key: it is how many are larger, those in better buckets and
    some in its own. NARROW: 32-bit keys, for bf16 and columns below 2^16.
    """
    EACH: tl.constexpr = min(2, CAP // THREADS)
    STEP: tl.constexpr = EACH * THREADS
    for first in range(0, kept, STEP):
        slot = first + tl.arange(0, STEP)
        x, column = pair(room, slot)
        key = sort_key(x.to(tl.float32, bitcast=True), column, V, SHIFT, NARROW)
        put_key(room, slot, key, slot < kept, NARROW)
        bucket = sort_bucket(key, peak, least, V, BUCKETS, SHIFT, NARROW)
        counted_up(cells, bucket, slot < kept)
    tl.debug_barrier()
    accumulated(cells, BUCKETS, THREADS)
    tl.debug_barrier()
    for first in range(0, kept, STEP):
        slot = first + tl.arange(0, STEP)
        key = key_in(room, slot, NARROW)
        bucket = sort_bucket(key, peak, least, V, BUCKETS, SHIFT, NARROW)
        at = counted_up(cells, bucket, slot < kept)
        if NARROW:
            set_cell(other, at, key, slot < kept)
        else:
            put_key(other, at, key, slot < kept, NARROW)
    tl.debug_barrier()
    # Each cell says now where the next bucket begins.
    for first in range(0, kept, STEP):
        slot = first + tl.arange(0, STEP)
        key = cell(other, slot) if NARROW else key_in(other, slot, NARROW)
        bucket = sort_bucket(key, peak, least, V, BUCKETS, SHIFT, NARROW)
        end = cell(cells, bucket)
        begin = tl.where(bucket > 0, cell(cells, tl.maximum(bucket - 1, 0)), 0)
        held = tl.where(slot < kept, end - begin, 0)
        place = begin + larger_in_slice(other, begin, held, key, EACH, NARROW)
        put_key(room, place, key, (slot < kept) & (place < K), NARROW)
    tl.debug_barrier()
    # Neighbours write neighbours.
    for first in range(0, K, STEP):
        place = first + tl.arange(0, STEP)
        x, column = logit_and_column(key_in(room, place, NARROW), V, SHIFT, NARROW)
        value = value_of(x, peak, total, temperature, log)
        tl.store(values + row * K + place, value, mask=place < K)
        tl.store(indices + row * K + place, column, mask=place < K)
