# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k of many short rows: one program per row, which reads the row again from the cache.

With a row in registers only one program fits on a processor, and its waits are idle time. Here a
program holds a tile at a time, and four or more share a processor. The first pass gives each
thread's maximum and sum; further passes find a threshold (for large K) and what reaches it.
"""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import (
    emit,
    emit_summary,
    group_maxima,
    joined,
    key_of,
    larger,
    logit_of,
    next_bit,
    order_of,
    origin_of,
    rank_in_buckets,
    temperature_of,
    threshold,
    wait,
    words,
)
from trapline.gold.softmax_topk.triton.long_rows import edge
from trapline.gold.softmax_topk.triton.shared_memory import (
    add,
    cell,
    cells_for,
    count_in,
    emptied,
    pair,
    put,
    room_for,
    set_cell,
    space,
)

#: Rounds of bisection on values, before bisection on bits.
HALVED = tl.constexpr(8)


@triton.jit
def stored_at(base, start, skip, end, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Logits at positions from `start` on as they are stored, −inf where the row is not."""
    position = start + tl.arange(0, TILE)
    if (start >= skip) & (start + TILE <= end):
        x = tl.load(base + position)
    else:
        x = edge(base, position, skip, end, WIDTH).to(base.dtype.element_ty)
    return x


@triton.jit
def tile_at(base, start, skip, end, TILE: tl.constexpr, WIDTH: tl.constexpr):
    return stored_at(base, start, skip, end, TILE, WIDTH).to(tl.float32)


@triton.jit
def first_look(
    base, maxima, skip, end, scale,
    TILE: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Every thread's largest logit, and its sum of powers relative to that.

    The next tile is on its way while one is added. LISTED: a thread's largest logit of each tile
    goes to `maxima`.
    """
    peak = tl.full([THREADS], float("-inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    ahead = stored_at(base, 0, skip, end, TILE, WIDTH)
    for start in range(0, end, TILE):
        x = ahead.to(tl.float32)
        ahead = stored_at(base, start + TILE, skip, end, TILE, WIDTH)
        held = tl.reshape(x, [TILE // (THREADS * WIDTH), THREADS, WIDTH])
        best = tl.reduce(tl.reduce(held, 2, larger), 0, larger)
        if LISTED > 0:
            number = start // TILE * THREADS + tl.arange(0, THREADS)
            set_cell(maxima, number, best.to(tl.int32, bitcast=True))
        new = larger(peak, best)
        origin = origin_of(new)
        powers = tl.exp2((held - origin[None, :, None]) * scale)
        total = total * tl.exp2((peak - origin) * scale) + tl.sum(tl.sum(powers, 2), 0)
        peak = new
    return peak, total


@triton.jit
def three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def likely_bound(base, skip, end, DEVIATIONS, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Mean of the first tile's logits plus DEVIATIONS standard deviations.

    A guess: if logits are roughly normal, as many reach it as the caller wants. NaN if it has no
    finite logit, or one that is not a number.
    """
    x = tile_at(base, 0, skip, end, TILE, WIDTH)
    counted = x > float("-inf")
    x = tl.where(x == float("-inf"), 0.0, x)
    count, total, squares = tl.reduce((counted.to(tl.float32), x, x * x), 0, three_sums)
    mean = total / count
    return mean + DEVIATIONS * tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))


@triton.jit
def least_of(base, skip, end, TILE: tl.constexpr, WIDTH: tl.constexpr):
    low = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, end, TILE):
        low = tl.minimum(low, tile_at(base, start, skip, end, TILE, WIDTH))
    return tl.min(low, 0)


@triton.jit
def bound_again(
    base, skip, end, peak, K, ROOM, TILE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A bound that K to ROOM logits reach, or more where the K-th has many equals.

    Every round reads the row again. The first rounds bisect values, which takes three or four
    for ordinary logits; later ones bisect the bits, which always terminates. With NaN it is −inf.
    """
    least = order_of(least_of(base, skip, end, TILE, WIDTH), 0)
    most = order_of(peak, 0)
    found = tl.program_id(0) * 0
    rounds = found
    while (least < most) & ((found < K) | (found > ROOM)):
        a, b = logit_of(least.to(tl.uint64) << 32, 0), logit_of(most.to(tl.uint64) << 32, 0)
        value = a * 0.5 + b * 0.5
        middle = least + (most - least) // 2 + 1
        halved = order_of(value, 0)
        middle = tl.where((rounds < HALVED) & (halved > least) & (halved <= most), halved, middle)
        limit = logit_of(middle.to(tl.uint64) << 32, 0)
        hits = tl.zeros([TILE], tl.int32)
        for start in range(0, end, TILE):
            x = tile_at(base, start, skip, end, TILE, WIDTH)
            hits += ((x < limit) == 0).to(tl.int32)
        found = tl.sum(hits, 0)
        least = tl.where(found >= K, middle, least)
        most = tl.where(found >= K, most, middle - 1)
        rounds += 1
    found_bound = logit_of(least.to(tl.uint64) << 32, 0)
    return tl.where(peak != peak, float("-inf"), found_bound)


@triton.jit
def keep_reached(
    room, base, skip, end, least, TILE: tl.constexpr, CAP: tl.constexpr, THREADS: tl.constexpr,
    WIDTH: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Keeps logits that are not below `least`; −inf beyond the row loses every tie."""
    for start in range(0, end, TILE):
        x = tile_at(base, start, skip, end, TILE, WIDTH)
        add(room, x, start + tl.arange(0, TILE) - skip, least, CAP, THREADS, not RANKED)


@triton.jit
def piece_logits(
    base, listed, first, count, skip, end,
    TILE: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Logits of PIECES of the listed pieces, and columns, which are −1 for those not in the row.

    A piece is what one thread held of one tile, 16 bytes at a time.
    """
    slot = first + tl.arange(0, PIECES)
    _, number = pair(listed, slot)
    number = tl.where(slot < count, number, 0)[:, None]
    of_thread = tl.arange(0, TILE // THREADS)[None, :]
    position = number // THREADS * TILE + number % THREADS * WIDTH
    position += of_thread // WIDTH * (THREADS * WIDTH) + of_thread % WIDTH
    here = (slot < count)[:, None]
    x = tl.load(base + position, mask=here & (position < tl.cdiv(end, WIDTH) * WIDTH), other=0.0)
    column = tl.where(here & (position >= skip) & (position < end), position - skip, -1)
    SIZE: tl.constexpr = PIECES * (TILE // THREADS)
    return tl.reshape(x.to(tl.float32), [SIZE]), tl.reshape(column, [SIZE])


@triton.jit
def keep_listed(
    room, listed, maxima, base, skip, end, least,
    TILE: tl.constexpr, CAP: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """`keep_reached`, but only pieces whose maximum reaches `least` are read again.

    Where more than LISTED do, as of equal logits, the whole row is.
    """
    number = tl.arange(0, TILES * THREADS)
    best = cell(maxima, number).to(tl.float32, bitcast=True)
    number = tl.where(number < tl.cdiv(end, TILE) * THREADS, number, -1)
    add(listed, best, number, least, LISTED, THREADS, False)
    tl.debug_barrier()
    count = count_in(listed)
    if count > LISTED:
        keep_reached(room, base, skip, end, least, TILE, CAP, THREADS, WIDTH, True)
    else:
        x, column = piece_logits(base, listed, 0, count, skip, end, TILE, THREADS, WIDTH, LISTED)
        add(room, x, column, least, CAP, THREADS, False)


@triton.jit
def keep_exactly_again(
    room, base, skip, end, K,
    TILE: tl.constexpr, CAP: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Leaves exactly the K best in the room; returns a lower bound of them."""
    kth = kth_again(base, skip, end, K, TILE, WIDTH, SHIFT)
    emptied(room)
    for start in range(0, end, TILE):
        x = tile_at(base, start, skip, end, TILE, WIDTH)
        column = start + tl.arange(0, TILE) - skip
        exact = tl.where(key_of(x, column, SHIFT) >= kth, column, -1)
        add(room, x, exact, float("-inf"), CAP, THREADS)
    tl.debug_barrier()
    return logit_of(kth, SHIFT)


@triton.jit
def in_order(room, key, place, K, ANSWERS: tl.constexpr):
    """Sorts keys by their places, so that adjacent threads write adjacent results."""
    tl.debug_barrier()
    upper, lower = words(key)
    put(room, place, upper, lower, place < K)
    tl.debug_barrier()
    slot = tl.arange(0, ANSWERS)
    upper, lower = pair(room, slot)
    return joined(upper, lower), slot


@triton.jit
def kth_again(
    base, skip, end, K, TILE: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """A number that exactly K of the keys reach."""
    kth = (tl.program_id(0) * 0).to(tl.uint64)
    bit = kth + (1 << 63)
    found = tl.program_id(0) * 0
    while (bit > 0) & (found != K):
        hits = tl.zeros([TILE], tl.int32)
        for start in range(0, end, TILE):
            x = tile_at(base, start, skip, end, TILE, WIDTH)
            column = start + tl.arange(0, TILE) - skip
            hits += ((column >= 0) & (key_of(x, column, SHIFT) >= (kth | bit))).to(tl.int32)
        found = tl.sum(hits, 0)
        kth = tl.where(found >= K, kth | bit, kth)
        bit = next_bit(bit, SHIFT)
    return kth


@launched
@triton.jit(do_not_specialize=["V", "K", "logits_row", "log"])
def many_kernel(
    logits, temperatures, temperature, rooms, values, indices, lse, row_max,
    V, K, logits_row, log, deviations,
    TILE: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    CAP: tl.constexpr, ANSWERS: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr,
    TILES: tl.constexpr, LISTED: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What is not below a threshold is kept and ranked, as in `short_kernel`.

    For large K the threshold is guessed from a sample first; if it keeps too few or too many, the
    row is read again until one does not.
    """
    row = tl.program_id(0).to(tl.int64)
    skip = ((row * logits_row) % WIDTH).to(tl.int32)
    base = logits + (row * logits_row // WIDTH) * WIDTH
    end = V + skip
    at = row * (3 * CAP + 4 + 2 * LISTED + TILES * THREADS)
    room = room_for(rooms, at, CAP)
    cells = cells_for(rooms, at + 2 * CAP + 2, CAP)
    if LISTED > 0:
        listed = room_for(rooms, at + 3 * CAP + 2, LISTED)
        maxima = space(rooms, at + 3 * CAP + 4 + 2 * LISTED, 4 * TILES * THREADS)
    else:
        listed, maxima = room, cells
    tl.debug_barrier()
    wait(PDL)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    each, share = first_look(base, maxima, skip, end, scale, TILE, THREADS, WIDTH, LISTED)
    peak = tl.reduce(each, 0, larger)
    if RANKED:
        least = threshold(group_maxima(each, GROUPS), K)
    else:
        least = likely_bound(base, skip, end, deviations, TILE, WIDTH)
    if LISTED > 0:
        tl.debug_barrier()
        keep_listed(
            room, listed, maxima, base, skip, end, least,
            TILE, CAP, THREADS, WIDTH, TILES, LISTED,
        )  # fmt: skip
    else:
        keep_reached(room, base, skip, end, least, TILE, CAP, THREADS, WIDTH, RANKED)
    total = tl.sum(share * tl.exp2((each - origin_of(peak)) * scale), 0)
    tl.debug_barrier()
    kept = count_in(room)
    if not RANKED:  # noqa: SIM102 (the first condition is decided when the kernel is compiled)
        if (kept < K) | (kept > CAP) | (least != least):
            emptied(room)
            least = bound_again(base, skip, end, peak, K, CAP, TILE, WIDTH)
            keep_reached(room, base, skip, end, least, TILE, CAP, THREADS, WIDTH, RANKED)
            tl.debug_barrier()
            kept = count_in(room)
    if kept > CAP:
        least = keep_exactly_again(room, base, skip, end, K, TILE, CAP, THREADS, WIDTH, SHIFT)
        kept = K
    slot = tl.arange(0, CAP)
    kept_x, kept_column = pair(room, slot)
    key = key_of(kept_x.to(tl.float32, bitcast=True), kept_column, SHIFT)
    key = tl.where(slot < kept, key, 0)
    tl.debug_barrier()
    place = rank_in_buckets(room, cells, key, slot < kept, peak, least, V, CAP, SHIFT)
    place = tl.where(slot < kept, place, K)
    if not RANKED:
        key, place = in_order(room, key, place, K, ANSWERS)
    emit(key, place, peak, total, temperature, row, values, indices, K, log, SHIFT)
    emit_summary(lse, row_max, row, peak, total, temperature)
