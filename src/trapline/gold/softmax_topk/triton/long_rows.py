# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of long rows: one pass gives the maximum of every group of G neighbours, and a second
kernel reads the K best groups again.

Positions count from the last multiple of 16 bytes at or before the row's first logit, so that
loads are 16 bytes wide whatever V is: column = position − skip.
"""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import (
    bound,
    emit_summary,
    exactly,
    group_maxima,
    key_of,
    larger,
    next_bit,
    origin_of,
    temperature_of,
    threshold,
    wait,
)
from trapline.gold.softmax_topk.triton.ordered import emit_by_rank, emit_sorted, space_to_sort
from trapline.gold.softmax_topk.triton.packed import (
    edge_words,
    halves,
    powers_of_words,
    words_of,
)
from trapline.gold.softmax_topk.triton.shared_memory import (
    add,
    cells_for,
    count_in,
    emptied,
    pair,
    room_for,
    set_cell,
    space,
)
from trapline.gold.softmax_topk.triton.small_k import (
    add_several,
    keep_words,
    least_and_largest,
)


@triton.jit
def streamed(
    word, maxima, start, peak, total, scale,
    G: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds one tile. Every thread has its own maximum and sum: no barrier in the loop."""
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    low, high = halves(tl.reshape(word, [WORDS // (4 * THREADS), THREADS, 4]), SHIFT)
    wide = tl.reduce(larger(low, high), 2, larger)
    GROUPS: tl.constexpr = PER * WORDS // G
    best = tl.reduce(tl.reshape(wide, [GROUPS, G // (4 * PER)]), 1, larger)
    tl.store(maxima + PER * start // G + tl.arange(0, GROUPS), best)
    new = larger(peak, tl.reduce(wide, 0, larger))
    origin = origin_of(new)
    powers = powers_of_words(low, high, origin[None, :, None], scale, SHIFT)
    total = total * tl.exp2((peak - origin) * scale) + tl.sum(tl.sum(powers, 2), 0)
    return new, total


@triton.jit
def read_split(
    logits, scale, maxima, peaks, totals, row, split,
    V, logits_row, groups, blocks, splits,
    G: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The group maxima of one split of a row, and its part of the softmax sum."""
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    WORDS: tl.constexpr = BLOCK // PER
    skip = ((row * logits_row) % WIDTH).to(tl.int32)
    base = words_of(logits + (row * logits_row // WIDTH) * WIDTH)
    maxima += row * groups
    peak = tl.full([THREADS], float("-inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    begin = split * blocks * WORDS
    end = tl.minimum(split * blocks * BLOCK + blocks * BLOCK, V + skip)
    if (PER * begin < skip) & (PER * begin < end):
        word = edge_words(base, begin, skip, end, WORDS, SHIFT, EVEN)
        peak, total = streamed(word, maxima, begin, peak, total, scale, G, WORDS, THREADS, SHIFT)
        begin += WORDS
    whole = begin + tl.maximum(end - PER * begin, 0) // BLOCK * WORDS
    for start in range(begin, whole, WORDS):
        word = tl.load(base + start + tl.arange(0, WORDS))
        peak, total = streamed(word, maxima, start, peak, total, scale, G, WORDS, THREADS, SHIFT)
    if PER * whole < end:
        word = edge_words(base, whole, skip, end, WORDS, SHIFT, EVEN)
        peak, total = streamed(word, maxima, whole, peak, total, scale, G, WORDS, THREADS, SHIFT)
    top = tl.reduce(peak, 0, larger)
    share = tl.sum(total * tl.exp2((peak - origin_of(top)) * scale), 0)
    tl.store(peaks + row * splits + split, top)
    tl.store(totals + row * splits + split, share)


@launched
@triton.jit(do_not_specialize=["V", "logits_row", "groups", "blocks", "splits"])
def stream_kernel(
    logits, temperatures, temperature, maxima, peaks, totals,
    V, logits_row, groups, blocks, splits,
    G: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, EVEN: tl.constexpr, PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    wait(PDL)
    scale = LOG2_E / temperature_of(temperatures, temperature, row, PER_ROW)
    read_split(
        logits, scale, maxima, peaks, totals, row, split, V, logits_row, groups, blocks, splits,
        G, BLOCK, THREADS, WIDTH, SHIFT, EVEN,
    )  # fmt: skip


@triton.jit
def group_best(maxima, V, skip, G: tl.constexpr, GROUPS_BLOCK: tl.constexpr):
    """All group maxima of a row, and a mask of those that exist."""
    number = tl.arange(0, GROUPS_BLOCK)
    here = number < tl.cdiv(V + skip, G)
    return tl.load(maxima + number, mask=here, other=float("-inf")), here


@triton.jit
def whole_softmax(peaks, totals, splits, temperature, SPLITS_BLOCK: tl.constexpr):
    split = tl.arange(0, SPLITS_BLOCK)
    part = tl.load(peaks + split, mask=split < splits, other=float("-inf"))
    share = tl.load(totals + split, mask=split < splits, other=0.0)
    peak = tl.reduce(part, 0, larger)
    return peak, tl.sum(share * tl.exp2((part - origin_of(peak)) * (LOG2_E / temperature)), 0)


@triton.jit
def list_groups(
    best, here, lists, K,
    THREADS: tl.constexpr, SUPER: tl.constexpr, LIST: tl.constexpr, CAP: tl.constexpr,
    SHIFT: tl.constexpr, RANKED: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """Lists groups that contain the K best logits; returns a lower bound for those logits.

    One warp finds it among SUPER maxima if they are SEARCHED. Empty groups beyond the row may be
    listed too.
    """
    listed, cells = lists[0], lists[2]
    number = tl.arange(0, best.numel)
    if SEARCHED:
        EACH: tl.constexpr = 4 * THREADS // SUPER
        held = tl.reshape(best, [best.numel // (4 * THREADS), SUPER, EACH])
        each = tl.reduce(tl.reduce(held, 2, larger), 0, larger)
        least, _most = least_and_largest(lists, each, K, SUPER, SHIFT)
        set_cell(cells, tl.arange(0, CAP), 0)
    elif RANKED:
        each = tl.reduce(tl.reshape(best, [best.numel // THREADS, THREADS]), 0, larger)
        least = threshold(group_maxima(each, SUPER), K)
    else:
        least = bound(best, here, K, LIST)
    add_several(listed, best, number, least, LIST, THREADS)
    tl.debug_barrier()
    if count_in(listed) > LIST:
        list_exactly(best, here, listed, K, THREADS, LIST, SHIFT)
    return least


@triton.jit
def list_exactly(
    best, here, listed, K, THREADS: tl.constexpr, LIST: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Lists the K best groups and no other."""
    number = tl.arange(0, best.numel)
    exact = tl.where(exactly(best, number, here, K, SHIFT), number, -1)
    emptied(listed)
    add(listed, best, exact, float("-inf"), LIST, THREADS)
    tl.debug_barrier()


@triton.jit
def group_logits(
    base, listed, first, count, skip, V,
    G: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """TILE of the listed groups: logits, and columns, which are −1 for those not in the row.

    Loads are 16 bytes wide, as those of `edge_words`.
    """
    slot = first + tl.arange(0, TILE)
    _, group = pair(listed, slot)
    group = tl.where(slot < count, group, 0)
    position = group[:, None] * G + tl.arange(0, G)[None, :]
    listed_here = (slot < count)[:, None]
    end = V + skip
    loaded = listed_here & (position < tl.cdiv(end, WIDTH) * WIDTH)
    x = tl.load(base + position, mask=loaded, other=0.0).to(tl.float32)
    inside = listed_here & (position >= skip) & (position < end)
    column = tl.where(inside, position - skip, -1)
    return tl.reshape(x, [TILE * G]), tl.reshape(column, [TILE * G])


@triton.jit
def kth_in_groups(
    base, listed, count, skip, V, K,
    G: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """`kth_of` for more keys than fit into registers: every round reads the groups again."""
    kth = (count * 0).to(tl.uint64)
    bit = kth + (1 << 63)
    found = count * 0
    while (bit > 0) & (found != K):
        found = count * 0
        for first in range(0, count, TILE):
            x, column = group_logits(base, listed, first, count, skip, V, G, TILE, WIDTH)
            reached = (column >= 0) & (key_of(x, column, SHIFT) >= (kth | bit))
            found += tl.sum(reached.to(tl.int32), 0)
        kth = tl.where(found >= K, kth | bit, kth)
        bit = next_bit(bit, SHIFT)
    return kth


@triton.jit
def keep_best(
    base, listed, room, least, skip, V, K,
    G: tl.constexpr, THREADS: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Reads the listed groups again and keeps candidates for the K best; returns their number."""
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    words = words_of(base)
    count = count_in(listed)
    for first in range(0, count, TILE):
        slot = first + tl.arange(0, TILE)
        group = tl.where(slot < count, pair(listed, slot)[1], 0)
        at = group[:, None] * (G // PER) + tl.arange(0, G // PER)[None, :]
        live = (slot < count)[:, None]
        keep_words(room, words, at, live, least, skip, V, CAP, THREADS, SHIFT, EVEN)
    tl.debug_barrier()
    kept = count_in(room)
    if kept > CAP:
        HELD: tl.constexpr = TILE * 4 // WIDTH
        keep_exactly(base, listed, room, skip, V, K, G, THREADS, HELD, CAP, WIDTH, SHIFT)
        kept = K
    return kept


@triton.jit
def keep_exactly(
    base, listed, room, skip, V, K,
    G: tl.constexpr, THREADS: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Keeps exactly the K best of the listed groups."""
    count = count_in(listed)
    kth = kth_in_groups(base, listed, count, skip, V, K, G, TILE, WIDTH, SHIFT)
    emptied(room)
    for first in range(0, count, TILE):
        x, column = group_logits(base, listed, first, count, skip, V, G, TILE, WIDTH)
        exact = tl.where(key_of(x, column, SHIFT) >= kth, column, -1)
        add(room, x, exact, float("-inf"), CAP, THREADS)
    tl.debug_barrier()


@triton.jit
def select_row(
    logits, temperature, maxima, peaks, totals, lists,
    values, indices, lse, row_max, row, V, K, logits_row, groups, splits, log,
    G: tl.constexpr, WIDTH: tl.constexpr, GROUPS_BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
    THREADS: tl.constexpr, SUPER: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr, EVEN: tl.constexpr,
    SEARCHED: tl.constexpr, SORTED: tl.constexpr, BUCKETS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The K best of one row from its group maxima."""
    listed, room, cells = lists[0], lists[1], lists[2]
    skip = ((row * logits_row) % WIDTH).to(tl.int32)
    base = logits + (row * logits_row // WIDTH) * WIDTH
    best, here = group_best(maxima + row * groups, V, skip, G, GROUPS_BLOCK)
    peaks, totals = peaks + row * splits, totals + row * splits
    peak, total = whole_softmax(peaks, totals, splits, temperature, SPLITS_BLOCK)
    least = list_groups(best, here, lists, K, THREADS, SUPER, LIST, CAP, SHIFT, RANKED, SEARCHED)
    kept = keep_best(
        base, listed, room, least, skip, V, K, G, THREADS, TILE, CAP, WIDTH, SHIFT, EVEN
    )
    if SORTED:
        emit_sorted(
            room, lists[4], cells, kept, peak, least, V, total, temperature, row, values, indices,
            K, log, CAP, BUCKETS, THREADS, SHIFT, NARROW,
        )  # fmt: skip
    else:
        emit_by_rank(
            room, cells, kept, peak, least, V, total, temperature, row, values, indices, K, log,
            CAP, BUCKETS, THREADS, SHIFT, not RANKED,
        )  # fmt: skip
    emit_summary(lse, row_max, row, peak, total, temperature)


@triton.jit
def empty_lists(
    rooms, row, LIST: tl.constexpr, CAP: tl.constexpr, SORTED: tl.constexpr,
    BUCKETS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """A room for groups, one for candidates, BUCKETS cells and two more, behind a barrier.

    SORTED: and space to sort the candidates in.
    """
    at = row * (2 * LIST + 4 * CAP + BUCKETS + 8)
    listed, room = room_for(rooms, at, LIST), room_for(rooms, at + 2 * LIST + 2, CAP)
    at += 2 * LIST + 2 * CAP + 4
    cells, few = cells_for(rooms, at, BUCKETS), space(rooms, at + BUCKETS, 8)
    other = room
    if SORTED:
        other = space_to_sort(rooms, at + BUCKETS + 2, CAP, NARROW)
    tl.debug_barrier()
    return listed, room, cells, few, other


@launched
@triton.jit(do_not_specialize=["V", "K", "logits_row", "groups", "splits", "log"])
def select_kernel(
    logits, temperatures, temperature, maxima, peaks, totals, rooms,
    values, indices, lse, row_max,
    V, K, logits_row, groups, splits, log,
    G: tl.constexpr, WIDTH: tl.constexpr, GROUPS_BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
    THREADS: tl.constexpr, SUPER: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr,
    EVEN: tl.constexpr, SEARCHED: tl.constexpr, SORTED: tl.constexpr, BUCKETS: tl.constexpr,
    NARROW: tl.constexpr, PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lists = empty_lists(rooms, row, LIST, CAP, SORTED, BUCKETS, NARROW)
    wait(PDL)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    select_row(
        logits, temperature, maxima, peaks, totals, lists, values, indices, lse, row_max, row,
        V, K, logits_row, groups, splits, log,
        G, WIDTH, GROUPS_BLOCK, SPLITS_BLOCK, THREADS, SUPER, LIST, TILE, CAP, SHIFT, RANKED, EVEN,
        SEARCHED, SORTED, BUCKETS, NARROW,
    )  # fmt: skip
