# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of long rows: one read leaves the maximum of every group of G neighbours; the K best groups
are looked at again.

Positions count from the last multiple of 16 bytes at or before the row's first logit, so that
loads are 16 bytes wide whatever V is: column = position − skip.
"""

import triton
import triton.language as tl

from trapline.gold.softmax_topk.kernels_order import (
    LOG2_E,
    bound,
    emit,
    emit_summary,
    exactly,
    group_maxima,
    key_of,
    kth_of,
    larger,
    make_way,
    next_bit,
    origin_of,
    places,
    rank,
    temperature_of,
    threshold,
    wait,
)


@triton.jit
def edge(base, position, skip, end, WIDTH: tl.constexpr):
    """Logits from `skip` to `end`, −inf around them.

    `base` and every position a thread begins with are multiples of WIDTH logits, 16 bytes. What
    lies around is read with its 16 bytes, or the loads would be narrow; it is never used.
    """
    x = tl.load(base + position, mask=position < tl.cdiv(end, WIDTH) * WIDTH, other=0.0)
    inside = (position >= skip) & (position < end)
    return tl.where(inside, x.to(tl.float32), float("-inf"))


@triton.jit
def streamed(
    x, maxima, start, peak, total, scale,
    G: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Takes one tile in. Every thread has its own maximum and sum: no barrier in the loop."""
    held = tl.reshape(x, [BLOCK // (THREADS * WIDTH), THREADS, WIDTH])
    wide = tl.reduce(held, 2, larger)
    best = tl.reduce(tl.reshape(wide, [BLOCK // G, G // WIDTH]), 1, larger)
    tl.store(maxima + start // G + tl.arange(0, BLOCK // G), best)
    new = larger(peak, tl.reduce(wide, 0, larger))
    origin = origin_of(new)
    powers = tl.exp2((held - origin[None, :, None]) * scale)
    total = total * tl.exp2((peak - origin) * scale) + tl.sum(tl.sum(powers, 2), 0)
    return new, total


@triton.jit(do_not_specialize=["V", "logits_row", "groups", "blocks", "splits"])
def stream_kernel(
    logits, temperatures, temperature, maxima, peaks, totals,
    V, logits_row, groups, blocks, splits,
    G: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The group maxima of one split of a row, and its share of the softmax sum."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    wait(PDL)
    scale = LOG2_E / temperature_of(temperatures, temperature, row, PER_ROW)
    skip = ((row * logits_row) % WIDTH).to(tl.int32)
    base = logits + (row * logits_row // WIDTH) * WIDTH
    maxima += row * groups
    peak = tl.full([THREADS], float("-inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    begin = split * blocks * BLOCK
    end = tl.minimum(begin + blocks * BLOCK, V + skip)
    if (begin < skip) & (begin < end):
        position = begin + tl.arange(0, BLOCK)
        x = edge(base, position, skip, end, WIDTH)
        peak, total = streamed(x, maxima, begin, peak, total, scale, G, BLOCK, THREADS, WIDTH)
        begin += BLOCK
    whole = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    for start in range(begin, whole, BLOCK):
        x = tl.load(base + start + tl.arange(0, BLOCK)).to(tl.float32)
        peak, total = streamed(x, maxima, start, peak, total, scale, G, BLOCK, THREADS, WIDTH)
    if whole < end:
        position = whole + tl.arange(0, BLOCK)
        x = edge(base, position, skip, end, WIDTH)
        peak, total = streamed(x, maxima, whole, peak, total, scale, G, BLOCK, THREADS, WIDTH)
    make_way(PDL)
    top = tl.reduce(peak, 0, larger)
    share = tl.sum(total * tl.exp2((peak - origin_of(top)) * scale), 0)
    tl.store(peaks + row * splits + split, top)
    tl.store(totals + row * splits + split, share)


@triton.jit
def group_logits(
    logits, listed, first, count, skip, V, G: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """TILE of the listed groups: logits, columns, and which of them are in the row."""
    slot = first + tl.arange(0, TILE)
    group = tl.load(listed + slot, mask=slot < count, other=0)
    position = group[:, None] * G + tl.arange(0, G)[None, :]
    column = tl.reshape(position - skip, [TILE * G])
    inside = tl.reshape((slot < count)[:, None] & (position >= skip), [TILE * G]) & (column < V)
    x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return x, column, inside


@triton.jit
def kth_in_groups(
    logits, listed, count, skip, V, K,
    G: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """`kth_of` for more keys than registers hold: every round reads the groups again."""
    kth = (count * 0).to(tl.uint64)
    bit = kth + (1 << 63)
    found = count * 0
    while (bit > 0) & (found != K):
        found = count * 0
        for first in range(0, count, TILE):
            x, column, inside = group_logits(logits, listed, first, count, skip, V, G, TILE)
            reached = inside & (key_of(x, column, SHIFT) >= (kth | bit))
            found += tl.sum(reached.to(tl.int32), 0)
        kth = tl.where(found >= K, kth | bit, kth)
        bit = next_bit(bit, SHIFT)
    return kth


@triton.jit
def listed_groups(
    best, here, lists, K, THREADS: tl.constexpr, SUPER: tl.constexpr, LIST: tl.constexpr,
    SHIFT: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Lists groups among which the K best logits are; how many, and a bound for those logits."""
    number = tl.arange(0, best.numel)
    if RANKED:
        each = tl.reduce(tl.reshape(best, [best.numel // THREADS, THREADS]), 0, larger)
        least = threshold(group_maxima(each, SUPER), K)
    else:
        least = bound(best, here, K, LIST, SHIFT)
    taken = here & ((best < least) == 0)
    place, mine = places(taken, THREADS)
    tl.store(lists + place, number, mask=taken & (place < LIST))
    count = tl.sum(mine, 0)
    if count > LIST:
        tl.debug_barrier()
        taken = exactly(best, number, here, K, SHIFT)
        place, mine = places(taken, THREADS)
        tl.store(lists + place, number, mask=taken)
        count = K
    tl.debug_barrier()
    return count, least


@triton.jit
def loaded_keys(keys, count, CAP: tl.constexpr):
    slot = tl.arange(0, CAP)
    return tl.load(keys + slot, mask=slot < count, other=0).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["V", "K", "logits_row", "groups", "splits", "log"])
def select_kernel(
    logits, temperatures, temperature, maxima, peaks, totals, lists, keys,
    values, indices, lse, row_max,
    V, K, logits_row, groups, splits, log,
    G: tl.constexpr, WIDTH: tl.constexpr, GROUPS_BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
    THREADS: tl.constexpr, SUPER: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    CAP: tl.constexpr, K_BLOCK: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The K best of one row from its group maxima."""
    row = tl.program_id(0).to(tl.int64)
    skip = ((row * logits_row) % WIDTH).to(tl.int32)
    logits += row * logits_row
    lists += row * LIST
    keys += row * CAP
    number = tl.arange(0, GROUPS_BLOCK)
    here = number < tl.cdiv(V + skip, G)
    wait(PDL)
    best = tl.load(maxima + row * groups + number, mask=here, other=float("-inf"))
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    split = tl.arange(0, SPLITS_BLOCK)
    part = tl.load(peaks + row * splits + split, mask=split < splits, other=float("-inf"))
    share = tl.load(totals + row * splits + split, mask=split < splits, other=0.0)
    count, least = listed_groups(best, here, lists, K, THREADS, SUPER, LIST, SHIFT, RANKED)

    kept = count * 0
    for first in range(0, count, TILE):
        x, column, inside = group_logits(logits, lists, first, count, skip, V, G, TILE)
        chosen = inside & ((x < least) == 0)
        place, mine = places(chosen, THREADS)
        fits = chosen & (kept + place < CAP)
        tl.store(keys + kept + place, key_of(x, column, SHIFT), mask=fits)
        kept += tl.sum(mine, 0)
    if kept > CAP:
        tl.debug_barrier()
        kth = kth_in_groups(logits, lists, count, skip, V, K, G, TILE, SHIFT)
        kept = count * 0
        for first in range(0, count, TILE):
            x, column, inside = group_logits(logits, lists, first, count, skip, V, G, TILE)
            key = key_of(x, column, SHIFT)
            chosen = inside & (key >= kth)
            place = kept + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(keys + place, key, mask=chosen)
            kept += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()

    key = loaded_keys(keys, kept, CAP)
    peak = tl.reduce(part, 0, larger)
    total = tl.sum(share * tl.exp2((part - origin_of(peak)) * (LOG2_E / temperature)), 0)
    if RANKED:
        place = tl.where(key > 0, rank(key), K)
    else:
        chosen = key >= kth_of(key, K, SHIFT)
        place, _ = places(chosen, THREADS)
        tl.debug_barrier()
        tl.store(keys + place, key, mask=chosen)
        tl.debug_barrier()
        key = tl.sort(loaded_keys(keys, K, K_BLOCK), descending=True)
        place = tl.arange(0, K_BLOCK)
    emit(key, place, peak, total, temperature, row, values, indices, K, log, SHIFT)
    emit_summary(lse, row_max, row, peak, total, temperature)
