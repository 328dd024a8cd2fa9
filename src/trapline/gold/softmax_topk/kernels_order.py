# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the top-k kernels share: keys in the order of the answer, thresholds, compaction, output.

A logit and its column make one unsigned 64-bit key: larger logit first, NaN first of all, ties to
the lower column. No two are equal, so a set of keys has one order, whatever order it is found in.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def origin_of(peak):
    """What is subtracted: 0 for nothing but −inf, where −inf − (−inf) would be NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def key_of(x, column, SHIFT: tl.constexpr):
    """The key; 0 is below all of them. The low SHIFT bits of x say nothing and are left out."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 becomes +0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    high = (bits.to(tl.uint32, bitcast=True) ^ 0x80000000) >> SHIFT << SHIFT
    low = column.to(tl.uint32) ^ 0xFFFFFFFF
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def logit_of(key, SHIFT: tl.constexpr):
    bits = ((key >> 32).to(tl.uint32) ^ 0x80000000).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def column_of(key):
    return (key.to(tl.uint32) ^ 0xFFFFFFFF).to(tl.int64)


@triton.jit
def threshold(maxima, K):
    """At least K of the groups with these maxima hold a logit that is not below it.

    Their K-th largest: who is beaten by fewer than K stays. NaN beats nobody here and is beaten by
    nobody, so it can only lower the threshold.
    """
    beaten = tl.sum((maxima[:, None] > maxima[None, :]).to(tl.int32), 0)
    return tl.min(tl.where(beaten < K, maxima, float("inf")), 0)


@triton.jit
def next_bit(bit, SHIFT: tl.constexpr):
    """Down from the top; the bits that are the same in all keys are jumped over."""
    one = bit >> 1
    return tl.where(one == (1 << (31 + SHIFT)), 1 << 31, one)


@triton.jit
def kth_of(keys, K, SHIFT: tl.constexpr):
    """A number that exactly K of the keys reach, by bisection on the bits."""
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
def places(chosen, THREADS: tl.constexpr):
    """A place for each chosen element, without gaps, and how many there are.

    Every THREADS-th element is in the same thread, so all but the sum over threads stays within
    one. The order is theirs, not the elements'.
    """
    one = tl.reshape(chosen.to(tl.int32), [chosen.numel // THREADS, THREADS])
    mine = tl.sum(one, 0)
    place = tl.cumsum(one, 0) + (tl.cumsum(mine, 0) - mine - 1)[None, :]
    return tl.reshape(place, chosen.shape), tl.sum(mine, 0)


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
def value_of(x, peak, total, temperature, LOG: tl.constexpr):
    """Subtracted before divided: scaled logits may overflow, their differences only underflow."""
    if LOG:
        value = (x - peak) / temperature - tl.log2(total) * LN_2
    else:
        value = tl.exp2((x - peak) * (LOG2_E / temperature)) / total
    return value


@triton.jit
def emit_in_order(
    kept_logits, kept_columns, count, peak, total, temperature, row, values, indices, K,
    CAP: tl.constexpr, LOG: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The K best of `count` logits in memory: few are ranked by counting, many are sorted."""
    slot = tl.arange(0, CAP)
    x = tl.load(kept_logits + slot, mask=slot < count, other=0.0)
    column = tl.load(kept_columns + slot, mask=slot < count, other=0)
    key = tl.where(slot < count, key_of(x, column, SHIFT), 0)
    if RANKED:
        place = tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)
        place = tl.where(slot < count, place, K)
    else:
        key = tl.sort(key, descending=True)
        place = slot
    value = value_of(logit_of(key, SHIFT), peak, total, temperature, LOG)
    tl.store(values + row * K + place, value, mask=place < K)
    tl.store(indices + row * K + place, column_of(key), mask=place < K)
