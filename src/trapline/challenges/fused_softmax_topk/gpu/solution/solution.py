"""Softmax and top-k of every row, with one reading of the logits.

A row is cut into chunks that fit into the registers of one program. A program keeps the few entries
of its chunk that can be among the k largest, and the chunk's maximum and sum. A second kernel
merges the chunks of a row.

An entry travels as one 64-bit number: its logit as an integer of the same order in the upper half,
and in the lower half a number that falls with its column: the larger entry ranks first.
"""

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-(1 << 31))  # below the key of −inf
NO_ENTRY = tl.constexpr(-(1 << 63))
MOST_COLUMNS = 16384
MOST_MERGED = 2048
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors


@triton.jit
def _ordered(x):
    """int32 keys in the order of x. −0 and +0 have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The number whose key this is."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_kernel(
    logits, entries, maxima, sums, V, row_stride, k, chunks, width,
    GROUPS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    lanes = tl.arange(0, BLOCK)
    columns = (program % chunks).to(tl.int32) * width + lanes
    inside = (lanes < width) & (columns < V)
    start = logits + row * row_stride
    x = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32)

    largest = tl.max(x, 0)
    weights = tl.where(x == -float("inf"), 0.0, tl.exp(x - largest))
    tl.store(maxima + program, largest)
    tl.store(sums + program, tl.sum(weights, 0))

    # A bound that at least k entries reach: the smallest of k or more groups' maxima. Where more
    # entries reach it than there is room for, raise it by bisection.
    key = tl.where(inside, _ordered(x), LOWEST)
    groups = tl.reshape(key, [BLOCK // GROUPS, GROUPS], can_reorder=True)
    low = tl.min(tl.max(groups, 0), 0)
    high = tl.max(key, 0) + 1
    count = tl.sum(((key >= low) & inside).to(tl.int32), 0)
    while (count > ROOM) & (high.to(tl.int64) - low > 1):
        middle = ((low.to(tl.int64) + high) // 2).to(tl.int32)
        reach = tl.sum((key >= middle).to(tl.int32), 0)
        enough = reach >= k
        count = tl.where(enough, reach, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    # Everything above the bound comes first; entries equal to it fill up in the order of columns.
    above = key > low
    equal = (key == low) & inside
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    number = tl.sum(above.to(tl.int32), 0)
    place = tl.where(above, before & 0xFFFF, number + (before >> 16))
    entry = (key.to(tl.int64) << 32) | (columns ^ 0x7FFFFFFF).to(tl.int64)
    mine = entries + program * ROOM
    tl.store(mine + place, entry, mask=(above | equal) & (place < ROOM))
    filled = number + tl.sum(equal.to(tl.int32), 0)
    tl.store(mine + lanes, NO_ENTRY, mask=(lanes >= filled) & (lanes < ROOM))


@triton.jit
def _merge_kernel(
    entries, maxima, sums, probs, indices, k, chunks, count,
    LANES: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    for first in range(0, chunks, LANES):
        lanes = first + tl.arange(0, LANES)
        there = lanes < chunks
        maximum = tl.load(maxima + row * chunks + lanes, mask=there, other=-float("inf"))
        part = tl.load(sums + row * chunks + lanes, mask=there, other=0.0)
        new = tl.maximum(largest, tl.max(maximum, 0))
        part = tl.where(maximum == -float("inf"), 0.0, part * tl.exp(maximum - new))
        earlier = tl.where(largest == -float("inf"), 0.0, total * tl.exp(largest - new))
        total = earlier + tl.sum(part, 0)
        largest = new

    places = tl.arange(0, SIZE)
    mine = entries + row * count
    best = tl.topk(tl.load(mine + places, mask=places < count, other=NO_ENTRY), KEPT)
    for first in range(SIZE, count, SIZE):
        more = tl.load(mine + first + places, mask=first + places < count, other=NO_ENTRY)
        more = tl.topk(more, KEPT)
        best = tl.topk(tl.reshape(tl.join(best, more), [2 * KEPT]), KEPT)

    ranks = tl.arange(0, KEPT)
    prob = tl.exp(_value((best >> 32).to(tl.int32)) - largest) / total
    index = (best & 0x7FFFFFFF) ^ 0x7FFFFFFF
    tl.store(probs + row * k + ranks, prob, mask=ranks < k)
    tl.store(indices + row * k + ranks, index, mask=ranks < k)


def _width(rows, V):
    """Columns a program reads: few rows are cut finer, to keep every processor busy."""
    chunks = max(triton.cdiv(V, MOST_COLUMNS), min(triton.cdiv(PROGRAMS, rows), V // 1024), 1)
    return 8 * triton.cdiv(triton.cdiv(V, chunks), 8)


def softmax_topk(logits, k, probs, indices):
    rows, V = logits.shape
    if rows == 0:
        return
    width = _width(rows, V)
    chunks = triton.cdiv(V, width)
    kept = max(2, triton.next_power_of_2(k))
    room = 2 * kept
    block = max(triton.next_power_of_2(width), room)

    entries = torch.empty((rows, chunks, room), dtype=torch.int64, device=logits.device)
    maxima = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    _chunk_kernel[(rows * chunks,)](
        logits, entries, maxima, sums, V, logits.stride(0), k, chunks, width,
        GROUPS=kept, ROOM=room, BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
    count = chunks * room
    size = min(triton.next_power_of_2(count), MOST_MERGED)
    _merge_kernel[(rows,)](
        entries, maxima, sums, probs, indices, k, chunks, count,
        LANES=128, SIZE=size, KEPT=kept, num_warps=min(max(size // 256, 1), 8),
    )  # fmt: skip
