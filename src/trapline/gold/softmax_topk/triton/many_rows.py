# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k, k beyond 64, of many short rows: a program per row reads it again from the cache.

With a row in registers only one program fits on a processor, and its waits are idle time. Here a
program holds a tile at a time, and four or more share a processor. The first pass gives each
thread's maximum and sum; further passes find a threshold and what reaches it. For k from 256 on of
16-bit logits there is `many_rows_narrow`.
"""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import (
    emit_summary,
    key_of,
    larger,
    logit_of,
    next_bit,
    order_of,
    origin_of,
    temperature_of,
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
    room_for,
    set_cell,
)
from trapline.gold.softmax_topk.triton.small_k import keep_words

#: Rounds of bisection on values, before bisection on bits.
HALVED = tl.constexpr(8)


@triton.jit
def edge(base, position, skip, end, WIDTH: tl.constexpr):
    """Logits from `skip` to `end`, −inf around them.

    `base` and every position a thread begins with are multiples of WIDTH logits, 16 bytes. What
    lies around the row is loaded too, to keep loads 16 bytes wide, but never used.
    """
    x = tl.load(base + position, mask=position < tl.cdiv(end, WIDTH) * WIDTH, other=0.0)
    inside = (position >= skip) & (position < end)
    return tl.where(inside, x.to(tl.float32), float("-inf"))


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
def tile_words(
    base, start, skip, end, WORDS: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    if (PER * start >= skip) & (PER * (start + WORDS) <= end):
        word = tl.load(base + start + tl.arange(0, WORDS))
    else:
        word = edge_words(base, start, skip, end, WORDS, SHIFT, EVEN)
    return word


@triton.jit
def read_chunks(
    base, maxima, skip, end, scale,
    WORDS: tl.constexpr, THREADS: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Every thread's largest logit, and its sum of powers relative to that.

    The largest logit of each chunk of 16 bytes goes to `maxima`, unless that is None. The next
    tile is on its way while one is added.
    """
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    EACH: tl.constexpr = WORDS // (4 * THREADS)
    number = tl.arange(0, EACH)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
    peak = tl.full([THREADS], float("-inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    ahead = tile_words(base, 0, skip, end, WORDS, SHIFT, EVEN)
    for start in range(0, tl.cdiv(end, PER), WORDS):
        low, high = halves(tl.reshape(ahead, [EACH, THREADS, 4]), SHIFT)
        ahead = tile_words(base, start + WORDS, skip, end, WORDS, SHIFT, EVEN)
        best = tl.reduce(larger(low, high), 2, larger)
        if maxima is not None:
            set_cell(maxima, start // 4 + number, best.to(tl.int32, bitcast=True))
        new = larger(peak, tl.reduce(best, 0, larger))
        origin = origin_of(new)
        powers = powers_of_words(low, high, origin[None, :, None], scale, SHIFT)
        total = total * tl.exp2((peak - origin) * scale) + tl.sum(tl.sum(powers, 2), 0)
        peak = new
    return peak, total


@triton.jit
def three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def finite_sums(x):
    """1, the logit and its square; zeros for −inf."""
    counted = x > float("-inf")
    x = tl.where(x == float("-inf"), 0.0, x)
    return counted.to(tl.float32), x, x * x


@triton.jit
def likely_bound(
    base, skip, end, DEVIATIONS, WORDS: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Mean of the first tile's logits plus DEVIATIONS standard deviations.

    A guess: if logits are roughly normal, as many reach it as the caller wants. NaN if it has no
    finite logit, or one that is not a number.
    """
    low, high = halves(tile_words(base, 0, skip, end, WORDS, SHIFT, EVEN), SHIFT)
    count, total, squares = finite_sums(low)
    if SHIFT > 0:
        more, more_total, more_squares = finite_sums(high)
        count, total, squares = count + more, total + more_total, squares + more_squares
    count, total, squares = tl.reduce((count, total, squares), 0, three_sums)
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
    room, base, skip, V, least, WORDS: tl.constexpr, CAP: tl.constexpr, THREADS: tl.constexpr,
    SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Keeps logits of the whole row that are not below `least`."""
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    for start in range(0, tl.cdiv(V + skip, PER), WORDS):
        at = start + tl.arange(0, WORDS)
        keep_words(room, base, at, at >= 0, least, skip, V, CAP, THREADS, SHIFT, EVEN)


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
    TILE: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr, SORTED: tl.constexpr,
    BUCKETS: tl.constexpr, PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What is not below a threshold is kept, and ranked as in `short_kernel` or SORTED.

    The threshold is guessed from a sample first; if it keeps too few or too many, the row is read
    again until one does not.
    """
    row = tl.program_id(0).to(tl.int64)
    WORDS: tl.constexpr = TILE * 4 // WIDTH
    skip = 0 if EVEN else ((row * logits_row) % WIDTH).to(tl.int32)
    base = logits + (row * logits_row // WIDTH) * WIDTH
    words = words_of(base)
    end = V + skip
    at = row * (4 * CAP + BUCKETS + 4)
    room = room_for(rooms, at, CAP)
    cells = cells_for(rooms, at + 2 * CAP + 2, BUCKETS)
    other = room
    if SORTED:
        other = space_to_sort(rooms, at + 2 * CAP + BUCKETS + 2, CAP, False)
    tl.debug_barrier()
    wait(PDL)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    each, share = read_chunks(words, None, skip, end, scale, WORDS, THREADS, SHIFT, EVEN)
    peak = tl.reduce(each, 0, larger)
    least = likely_bound(words, skip, end, deviations, WORDS, SHIFT, EVEN)
    keep_reached(room, words, skip, V, least, WORDS, CAP, THREADS, SHIFT, EVEN)
    total = tl.sum(share * tl.exp2((each - origin_of(peak)) * scale), 0)
    tl.debug_barrier()
    kept = count_in(room)
    if (kept < K) | (kept > CAP) | (least != least):
        emptied(room)
        least = bound_again(base, skip, end, peak, K, CAP, TILE, WIDTH)
        keep_reached(room, words, skip, V, least, WORDS, CAP, THREADS, SHIFT, EVEN)
        tl.debug_barrier()
        kept = count_in(room)
    if kept > CAP:
        least = keep_exactly_again(room, base, skip, end, K, TILE, CAP, THREADS, WIDTH, SHIFT)
        kept = K
    if SORTED:
        emit_sorted(
            room, other, cells, kept, peak, least, V, total, temperature, row, values, indices,
            K, log, CAP, BUCKETS, THREADS, SHIFT, False,
        )  # fmt: skip
    else:
        emit_by_rank(
            room, cells, kept, peak, least, V, total, temperature, row, values, indices, K, log,
            CAP, BUCKETS, THREADS, SHIFT, True,
        )  # fmt: skip
    emit_summary(lse, row_max, row, peak, total, temperature)
