# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The places of a few hundred keys in the answer: by counting, or in buckets."""

import triton
import triton.language as tl

from trapline.gold.softmax_topk.kernels_order import order_of
from trapline.gold.softmax_topk.kernels_room import cell, counted_up, pair, put, set_cell


@triton.jit
def rank(key):
    """By how many others each is beaten. Which way it is summed only decides who waits for whom:

    up to a warp's width a warp compares one key with all, beyond it a thread does.
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
def bucket_of(key, peak, least, NUMBER: tl.constexpr, SHIFT: tl.constexpr):
    """Equal steps of the ordered bits from the largest logit down to the least; 0 is the best."""
    top = order_of(peak, SHIFT)
    span = (top - order_of(least, SHIFT)).to(tl.float32).to(tl.int32, bitcast=True)
    bits = (span >> 23) - 126  # of an integer: what its float has as exponent
    LOG: tl.constexpr = _log2(NUMBER)
    steps = (top - (key >> 32).to(tl.uint32)) >> tl.maximum(bits - LOG, 0).to(tl.uint32)
    return tl.minimum(steps, NUMBER - 1).to(tl.int32)


@triton.jit
def rank_in_buckets(
    room, cells, key, live, peak, least, NUMBER: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """By how many others each live key is beaten: all in better buckets, and some in its own.

    `cells`, NUMBER of them, are 0, and nobody needs what is in the room. Logits are spread over
    the buckets, a few in each; many that are equal are compared with each other.
    """
    bucket = bucket_of(key, peak, least, NUMBER, SHIFT)
    within = counted_up(cells, bucket, live)
    tl.debug_barrier()
    number = tl.arange(0, NUMBER)
    held = cell(cells, number)
    most = tl.max(held, 0)
    begin = tl.cumsum(held, 0) - held
    tl.debug_barrier()
    set_cell(cells, number, begin | (held << 16))
    tl.debug_barrier()
    mine = cell(cells, bucket)
    begin, held = mine & 0xFFFF, mine >> 16
    upper, lower = words(key)
    put(room, begin + within, upper, lower, live)
    tl.debug_barrier()
    beaten = begin
    for other in range(most):
        upper, lower = pair(room, begin + tl.maximum(tl.minimum(other, held - 1), 0))
        beaten += ((other < held) & (joined(upper, lower) > key)).to(tl.int32)
    return beaten
