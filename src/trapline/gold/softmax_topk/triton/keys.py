# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Shared by the top-k kernels: keys in the order of the answer, thresholds, ranks, output.

A logit and its column make one unsigned 64-bit key: larger logit first, NaN first of all, ties to
the lower column. No two are equal, so a set of keys has one order, whatever order it is found in.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.device import LOG2_E
from trapline.gold.softmax_topk.triton.shared_memory import (
    cell,
    counted_up,
    larger_in_slice,
    put,
    set_cell,
)

#: Programmatic dependent launch: when a kernel lets the next one start. Every kernel waits until
#: the results of the previous one are visible before it accesses memory.
NOT, EARLY, AFTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL == EARLY:
        gdc_launch_dependents()
    if PDL != NOT:
        gdc_wait()
    if PDL == AFTER:
        gdc_launch_dependents()


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def origin_of(peak):
    """What is subtracted: 0 for rows that are all −inf, where −inf − (−inf) would be NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def order_of(x, SHIFT: tl.constexpr):
    """Unsigned integers in the order of the floats, 0 below all; −0 is +0, NaN largest.

    The low SHIFT bits carry no information in a 16-bit float and are dropped.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return (bits.to(tl.uint32, bitcast=True) ^ 0x80000000) >> SHIFT << SHIFT


@triton.jit
def key_of(x, column, SHIFT: tl.constexpr):
    low = column.to(tl.uint32) ^ 0xFFFFFFFF
    return (order_of(x, SHIFT).to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def logit_of(key, SHIFT: tl.constexpr):
    bits = ((key >> 32).to(tl.uint32) ^ 0x80000000).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def column_of(key):
    return (key.to(tl.uint32) ^ 0xFFFFFFFF).to(tl.int64)


@triton.jit
def group_maxima(each, GROUPS: tl.constexpr):
    """Neighbouring threads together, until GROUPS are left."""
    return tl.reduce(tl.reshape(each, [GROUPS, each.numel // GROUPS]), 1, larger)


@triton.jit
def threshold(maxima, K):
    """At least K of the groups with these maxima hold a logit that is not below it.

    It is the K-th largest maximum: those beaten by fewer than K others stay. NaN compares false
    with everything here, so it can only lower the threshold.
    """
    beaten = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(beaten < K, maxima, float("inf")), 0)


@triton.jit
def bound(best, here, K, ROOM):
    """`threshold` by bisection, for many maxima: K to ROOM of them are not below it.

    More only where the K-th has many equals; all, where it is NaN.
    """
    order = tl.where(here, order_of(best, 0), 0)
    low, high = tl.min(tl.where(here, order, 0xFFFFFFFF), 0), tl.max(order, 0)
    found = tl.program_id(0) * 0
    while (low < high) & ((found < K) | (found > ROOM)):
        middle = low + (high - low) // 2 + 1
        found = tl.sum((order >= middle).to(tl.int32), 0)
        low = tl.where(found >= K, middle, low)
        high = tl.where(found >= K, high, middle - 1)
    return logit_of(low.to(tl.uint64) << 32, 0)


@triton.jit
def next_bit(bit, SHIFT: tl.constexpr):
    """The next lower bit; bits that are equal in all keys are skipped."""
    one = bit >> 1
    return tl.where(one == (1 << (31 + SHIFT)), 1 << 31, one)


@triton.jit
def kth_of(keys, K, SHIFT: tl.constexpr):
    """A number that exactly K keys are not below, by bisection on the bits."""
    kth = (tl.program_id(0) * 0).to(tl.uint64)
    bit = kth + (1 << 63)
    found = tl.program_id(0) * 0
    while (bit > 0) & (found != K):
        found = tl.sum((keys >= (kth | bit)).to(tl.int32), 0)
        kth = tl.where(found >= K, kth | bit, kth)
        bit = next_bit(bit, SHIFT)
    return kth


@triton.jit
def exactly(x, column, inside, K, SHIFT: tl.constexpr):
    """True for the K best."""
    key = tl.where(inside, key_of(x, column, SHIFT), 0)
    return key >= kth_of(key, K, SHIFT)


@triton.jit
def temperature_of(temperatures, temperature, row, PER_ROW: tl.constexpr):
    if PER_ROW:
        temperature = tl.load(temperatures + row)
    return temperature


@triton.jit
def emit_summary(lse, row_max, row, peak, total, temperature):
    tl.store(lse + row, peak / temperature + tl.log2(total) * LN_2)
    tl.store(row_max + row, peak)


@triton.jit
def value_of(x, peak, total, temperature, log):
    """Subtract before dividing: scaled logits may overflow, their differences only underflow."""
    log_prob = (x - peak) / temperature - tl.log2(total) * LN_2
    return tl.where(log != 0, log_prob, tl.exp2((x - peak) * (LOG2_E / temperature)) / total)


@triton.jit
def emit(
    key, place, peak, total, temperature, row, values, indices, K, log, SHIFT: tl.constexpr
):  # fmt: skip
    """Writes each key's value and column to its place in the answer."""
    value = value_of(logit_of(key, SHIFT), peak, total, temperature, log)
    tl.store(values + row * K + place, value, mask=place < K)
    tl.store(indices + row * K + place, column_of(key), mask=place < K)


@triton.jit
def rank(key):
    """How many other keys are larger than each key.

    The axis of the sum affects speed only: up to a warp's width a warp compares one key with all,
    beyond it a thread does.
    """
    if key.numel <= 32:
        beaten = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    else:
        beaten = tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)
    return beaten


@triton.jit
def words(key):
    """The upper and the lower half of keys."""
    upper, lower = (key >> 32).to(tl.uint32), key.to(tl.uint32)
    return upper.to(tl.int32, bitcast=True), lower.to(tl.int32, bitcast=True)


@triton.jit
def joined(upper, lower):
    upper, lower = upper.to(tl.uint32, bitcast=True), lower.to(tl.uint32, bitcast=True)
    return (upper.to(tl.uint64) << 32) | lower.to(tl.uint64)


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@triton.jit
def fine_order(key, V, SHIFT: tl.constexpr):
    """The ordered bits of the logit; those that a 16-bit float lacks grade the columns.

    Of bf16 logits dozens are equal: without the columns they would share a bucket.
    """
    order = (key >> 32).to(tl.uint32)
    if SHIFT > 0:
        STEPS: tl.constexpr = 1 << SHIFT
        # Rounding keeps the order: a lower column never gets a lower grade.
        after = (V - 1 - column_of(key).to(tl.int32)).to(tl.float32)
        grade = (tl.maximum(after, 0.0) * (STEPS / V.to(tl.float32))).to(tl.uint32)
        order |= tl.minimum(grade, STEPS - 1)
    return order


@triton.jit
def bucket_of(key, peak, least, V, NUMBER: tl.constexpr, SHIFT: tl.constexpr):
    """Equal steps of the ordered bits from the largest logit down to the least; 0 is the best."""
    return steps_below(fine_order(key, V, SHIFT), peak, least, NUMBER, SHIFT)


@triton.jit
def steps_below(order, peak, least, NUMBER: tl.constexpr, SHIFT: tl.constexpr):
    top = order_of(peak, SHIFT) | ((1 << SHIFT) - 1)
    span = (top - order_of(least, SHIFT)).to(tl.float32).to(tl.int32, bitcast=True)
    bits = (span >> 23) - 126  # of an integer: what its float has as exponent
    LOG: tl.constexpr = _log2(NUMBER)
    steps = (top - order) >> tl.maximum(bits - LOG, 0).to(tl.uint32)
    return tl.minimum(steps, NUMBER - 1).to(tl.int32)


@triton.jit
def rank_in_buckets(
    room, cells, key, live, peak, least, V,
    NUMBER: tl.constexpr, SHIFT: tl.constexpr, PACK: tl.constexpr = 1,
):  # fmt: skip
    """How many live keys are larger than each: all in better buckets, and some in its own.

    A thread holds at least PACK keys, which it compares side by side.

    `cells`, one for each of NUMBER buckets, are 0, and the contents of the room are overwritten.
    Logits spread over the buckets, a few in each; equal ones share a bucket and are compared with
    each other.
    """
    bucket = bucket_of(key, peak, least, V, NUMBER, SHIFT)
    within = counted_up(cells, bucket, live)
    tl.debug_barrier()
    number = tl.arange(0, NUMBER)
    held = cell(cells, number)
    begin = tl.cumsum(held, 0) - held
    tl.debug_barrier()
    set_cell(cells, number, begin | (held << 16))
    tl.debug_barrier()
    mine = cell(cells, bucket)
    begin, held = mine & 0xFFFF, mine >> 16
    upper, lower = words(key)
    put(room, begin + within, lower, upper, live)
    tl.debug_barrier()
    held = tl.where(live, held, 0)
    return begin + larger_in_slice(room, begin, held, key, PACK)
