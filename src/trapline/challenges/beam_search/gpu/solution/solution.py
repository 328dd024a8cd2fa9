"""A step of beam search: the best continuations of all beams, with one reading.

A row of log-probabilities is cut into chunks that fit into the registers of one program, which
keeps the few continuations that can be among the W best. A second kernel merges the chunks of all
beams of a prompt.

A continuation travels as one 64-bit number: its sum as an integer of the same order in the upper
half, and in the lower half a number that falls with its place among all continuations of the
prompt: the larger one ranks first.
"""

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-(1 << 31))
NO_ENTRY = tl.constexpr(-(1 << 63))
MOST_COLUMNS = 16384
MOST_MERGED = 2048
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors


@triton.jit
def _chunk_kernel(
    log_probs, sums, entries, V, W, batch_stride, beam_stride, chunks, width,
    GROUPS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    batch, beam = row // W, (row % W).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    columns = (program % chunks).to(tl.int32) * width + lanes
    start = log_probs + batch * batch_stride + beam.to(tl.int64) * beam_stride
    inside = (lanes < width) & (columns < V)
    x = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32)
    x = x + tl.load(sums + row)
    # A continuation of probability 0 does not count.
    inside = inside & (x > -float("inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)

    # A bound that at least W continuations reach: the smallest of W or more groups' maxima. Where
    # more reach it than there is room for, raise it by bisection.
    groups = tl.reshape(key, [BLOCK // GROUPS, GROUPS], can_reorder=True)
    low = tl.min(tl.max(groups, 0), 0)
    high = tl.max(key, 0) + 1
    count = tl.sum(((key >= low) & inside).to(tl.int32), 0)
    while (count > ROOM) & (high.to(tl.int64) - low > 1):
        middle = ((low.to(tl.int64) + high) // 2).to(tl.int32)
        reach = tl.sum((key >= middle).to(tl.int32), 0)
        enough = reach >= W
        count = tl.where(enough, reach, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    # Everything above the bound comes first; what equals it fills up in the order of tokens.
    above = key > low
    equal = (key == low) & inside
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    number = tl.sum(above.to(tl.int32), 0)
    place = tl.where(above, before & 0xFFFF, number + (before >> 16))
    candidate = beam * V + columns
    entry = (key.to(tl.int64) << 32) | (candidate ^ 0x7FFFFFFF).to(tl.int64)
    mine = entries + program * ROOM
    tl.store(mine + place, entry, mask=(above | equal) & (place < ROOM))
    filled = number + tl.sum(equal.to(tl.int32), 0)
    tl.store(mine + lanes, NO_ENTRY, mask=(lanes >= filled) & (lanes < ROOM))


@triton.jit
def _merge_kernel(
    entries, parents, tokens, new_sums, ended, V, W, eos_id, count,
    SIZE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SIZE)
    mine = entries + batch * count
    best = tl.topk(tl.load(mine + places, mask=places < count, other=NO_ENTRY), KEPT)
    for first in range(SIZE, count, SIZE):
        more = tl.load(mine + first + places, mask=first + places < count, other=NO_ENTRY)
        more = tl.topk(more, KEPT)
        best = tl.topk(tl.reshape(tl.join(best, more), [2 * KEPT]), KEPT)

    key = (best >> 32).to(tl.int32)
    value = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    candidate = ((best & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32)
    real = best != NO_ENTRY
    token = tl.where(real, candidate % V, -1)
    ranks = tl.arange(0, KEPT)
    at = batch * W + ranks
    tl.store(parents + at, tl.where(real, candidate // V, -1), mask=ranks < W)
    tl.store(tokens + at, token, mask=ranks < W)
    tl.store(new_sums + at, tl.where(real, value, -float("inf")), mask=ranks < W)
    tl.store(ended + at, (real & (token == eos_id)).to(tl.uint8), mask=ranks < W)


def _width(rows, V):
    """Tokens a program reads: few rows are cut finer, to keep every processor busy."""
    chunks = max(triton.cdiv(V, MOST_COLUMNS), min(triton.cdiv(PROGRAMS, rows), V // 1024), 1)
    return 8 * triton.cdiv(triton.cdiv(V, chunks), 8)


def beam_step(log_probs, sums, eos_id, parents, tokens, new_sums, ended):
    B, W, V = log_probs.shape
    if B == 0:
        return
    width = _width(B * W, V)
    chunks = triton.cdiv(V, width)
    kept = max(2, triton.next_power_of_2(W))
    room = 2 * kept
    block = max(triton.next_power_of_2(width), room)
    entries = torch.empty((B, W, chunks, room), dtype=torch.int64, device=log_probs.device)
    _chunk_kernel[(B * W * chunks,)](
        log_probs, sums, entries, V, W, *log_probs.stride()[:2], chunks, width,
        GROUPS=kept, ROOM=room, BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
    count = W * chunks * room
    size = min(triton.next_power_of_2(count), MOST_MERGED)
    _merge_kernel[(B,)](
        entries, parents, tokens, new_sums, ended.view(torch.uint8), V, W, eos_id, count,
        SIZE=size, KEPT=kept, num_warps=min(max(size // 256, 1), 8),
    )  # fmt: skip
