# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k, k from 256 on, of many short rows of 16-bit logits: a program of four warps per row.

It reads the row once. The first tile's mean and deviation give a guess of the threshold, and what
reaches it goes to shared memory while the powers are added up, one word for each candidate.
"""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import (
    LN_2,
    emit_summary,
    key_of,
    larger,
    logit_of,
    order_of,
    origin_of,
    temperature_of,
    wait,
)
from trapline.gold.softmax_topk.triton.many_rows import (
    bound_again,
    finite_sums,
    kth_again,
    stored_at,
    three_sums,
    tile_words,
)
from trapline.gold.softmax_topk.triton.narrow import (
    EACH,
    READ,
    largest_of_thread,
    note,
    note_words,
    raw_of_key,
    sort_candidates,
    sorter_in,
    twice,
)
from trapline.gold.softmax_topk.triton.packed import halves, powers_of_words, words_of
from trapline.gold.softmax_topk.triton.shared_memory import cell, count_in, emptied

#: The sum of powers is far from overflow and underflow if none exceeds 2 to this.
SAFE = tl.constexpr(64.0)


@triton.jit
def two_sums_and_larger(a, b, c, d, e, f):
    return a + d, b + e, larger(c, f)


@triton.jit
def sum_and_larger(a, b, c, d):
    return a + c, larger(b, d)


@triton.jit
def rounded(x, SHIFT: tl.constexpr):
    """As a 16-bit float."""
    return x.to(tl.bfloat16) if SHIFT == 16 else x.to(tl.float16)


@triton.jit
def by_threads(word, THREADS: tl.constexpr):
    """(parts, threads, 4): a thread has the words of each of its loads of 16 bytes."""
    return tl.reshape(word, [word.numel // (4 * THREADS), THREADS, 4])


@triton.jit
def sum_of_thread(x):
    return tl.sum(tl.sum(x, 2), 0)


@triton.jit
def statistics(word, largest, SHIFT: tl.constexpr):
    """Mean and standard deviation of these logits, and the maximum of `largest`.

    −inf does not count. They are NaN if nothing else is there, or a logit that is NaN.
    """
    low, high = halves(word, SHIFT)
    total, squares = sum_of_thread(low + high), sum_of_thread(low * low + high * high)
    total, squares, peak = tl.reduce((total, squares, largest), 0, two_sums_and_larger)
    count = total * 0.0 + 2.0 * word.numel
    if (squares < float("inf")) == 0:
        count, total, squares = finite_sums(low)
        more, more_total, more_squares = finite_sums(high)
        count, total = sum_of_thread(count + more), sum_of_thread(total + more_total)
        squares = sum_of_thread(squares + more_squares)
        count, total, squares = tl.reduce((count, total, squares), 0, three_sums)
    mean = total / count
    return mean, tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0)), peak


@triton.jit
def read_row(
    sorter, words, skip, end, scale, deviations,
    THREADS: tl.constexpr, SHIFT: tl.constexpr, SPARE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Notes what is not below a guess of the threshold, while the next tile is on its way.

    Returns the guess, a standard deviation, the sum of powers, what they are relative to, and the
    largest logit. There is a barrier between the first load and the first addition to the list.
    """
    WORDS: tl.constexpr = READ * THREADS
    found, counter = sorter[0], sorter[1]
    ahead = tile_words(words, 0, skip, end, WORDS, SHIFT, EVEN)
    parts = by_threads(ahead, THREADS)
    largest = largest_of_thread(parts, found, SHIFT)
    tl.debug_barrier()
    mean, deviation, origin = statistics(parts, largest, SHIFT)
    least, origin = mean + deviations * deviation, origin_of(origin)
    bound = rounded(least, SHIFT)
    total = tl.zeros([THREADS], tl.float32)
    for start in range(0, tl.cdiv(end, 2), WORDS):
        word = ahead
        ahead = tile_words(words, start + WORDS, skip, end, WORDS, SHIFT, EVEN)
        parts = by_threads(word, THREADS)
        low, high = halves(parts, SHIFT)
        total += sum_of_thread(powers_of_words(low, high, origin, scale, SHIFT))
        largest = larger(largest, largest_of_thread(parts, found, SHIFT))
        place = 2 * (start + tl.arange(0, WORDS))
        note_words(found, counter, word, place, twice(bound), EACH * THREADS, SHIFT, SPARE)
    total, peak = tl.reduce((total, largest), 0, sum_and_larger)
    return least, deviation, total, origin, peak


@triton.jit
def note_again(
    sorter, words, skip, end, least,
    THREADS: tl.constexpr, SHIFT: tl.constexpr, SPARE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Notes only what is not below another guess, and returns the number."""
    WORDS: tl.constexpr = READ * THREADS
    found, counter = sorter[0], sorter[1]
    bound = twice(rounded(least, SHIFT))
    emptied(counter)
    for start in range(0, tl.cdiv(end, 2), WORDS):
        word = tile_words(words, start, skip, end, WORDS, SHIFT, EVEN)
        place = 2 * (start + tl.arange(0, WORDS))
        note_words(found, counter, word, place, bound, EACH * THREADS, SHIFT, SPARE)
    tl.debug_barrier()
    return count_in(counter)


@triton.jit
def corrected(least, deviation, deviations, kept, wanted):
    """A better guess, after one that kept so many.

    Near this many deviations, the number of normal logits grows by so many times itself for each
    deviation less: e-fold for about every 1 / (0.8 + 0.8 z).
    """
    times = tl.log2(kept.to(tl.float32) / wanted) * LN_2
    return least + deviation * times / (0.8 + 0.8 * tl.maximum(deviations, 0.0))


@triton.jit
def sum_again(
    words, skip, end, origin, scale,
    WORDS: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([WORDS], tl.float32)
    for start in range(0, tl.cdiv(end, 2), WORDS):
        low, high = halves(tile_words(words, start, skip, end, WORDS, SHIFT, EVEN), SHIFT)
        total += powers_of_words(low, high, origin, scale, SHIFT)
    return tl.sum(total, 0)


@triton.jit
def note_from(
    sorter, base, skip, end, limit,
    TILE: tl.constexpr, CAP: tl.constexpr, SHIFT: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Notes only the logits whose `key_of` is not below the limit, and returns their number."""
    found, counter = sorter[0], sorter[1]
    emptied(counter)
    for start in range(0, end, TILE):
        x = stored_at(base, start, skip, end, TILE, 8)
        position = start + tl.arange(0, TILE)
        inside = (position >= skip) & (position < end)
        chosen = inside & (key_of(x.to(tl.float32), position - skip, SHIFT) >= limit)
        raw = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (position << SPARE)
        note(found, counter, raw, chosen, CAP)
    tl.debug_barrier()
    return count_in(counter)


@triton.jit
def emit_in_order(
    keys, skip, peak, total, temperature, scale, row, values, indices, K, log,
    STEP: tl.constexpr, SHIFT: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    share, log_total = 1.0 / total, tl.log2(total) * LN_2
    for first in range(0, K, STEP):
        place = first + tl.arange(0, STEP)
        raw = raw_of_key(cell(keys, place).to(tl.uint32, bitcast=True))
        below = halves(raw, SHIFT)[1] - peak
        value = tl.exp2(below * scale) * share
        if log != 0:
            value = below / temperature - log_total
        column = ((raw & 0xFFFF) >> SPARE) - skip
        tl.store(values + row * K + place, value, mask=place < K)
        tl.store(indices + row * K + place, column.to(tl.int64), mask=place < K)


@launched
@triton.jit(do_not_specialize=["V", "K", "logits_row", "log"])
def many_narrow_kernel(
    logits, temperatures, temperature, rooms, values, indices, lse, row_max,
    V, K, logits_row, log, deviations,
    THREADS: tl.constexpr, SHIFT: tl.constexpr, SPARE: tl.constexpr, SPACE: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Positions have 16 − SPARE bits. EVEN: rows begin and end with 16 bytes; PAIRS: K is even.

    If the guess keeps too few or too many, the row is read again: with a guess that was corrected
    by their number, and then until a threshold does not.
    """
    CAP: tl.constexpr = EACH * THREADS
    WORDS: tl.constexpr = READ * THREADS
    row = tl.program_id(0).to(tl.int64)
    skip = 0 if EVEN else ((row * logits_row) % 8).to(tl.int32)
    base = logits + (row * logits_row // 8) * 8
    words = words_of(base)
    end = V + skip
    sorter = sorter_in(rooms, row * SPACE, THREADS)
    wait(PDL)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    least, deviation, total, origin, peak = read_row(
        sorter, words, skip, end, scale, deviations, THREADS, SHIFT, SPARE, EVEN
    )
    if (tl.abs((peak - origin) * scale) <= SAFE) == 0:
        origin = origin_of(peak)
        total = sum_again(words, skip, end, origin, scale, WORDS, SHIFT, EVEN)
    total *= tl.exp2((origin - origin_of(peak)) * scale)
    tl.debug_barrier()
    kept = count_in(sorter[1])
    if (kept < K) | (kept > CAP):
        least = corrected(least, deviation, deviations, kept, (K + CAP) * 0.5)
        kept = note_again(sorter, words, skip, end, least, THREADS, SHIFT, SPARE, EVEN)
    # A guess of −inf keeps what is around the row, too.
    finite = rounded(least, SHIFT).to(tl.float32) > float("-inf")
    if (kept < K) | (kept > CAP) | (finite == 0):
        least = bound_again(base, skip, end, peak, K, CAP, 2 * WORDS, 8)
        limit = order_of(least, SHIFT).to(tl.uint64) << 32
        kept = note_from(sorter, base, skip, end, limit, 2 * WORDS, CAP, SHIFT, SPARE)
        if kept > CAP:
            limit = kth_again(base, skip, end, K, 2 * WORDS, 8, SHIFT)
            kept = note_from(sorter, base, skip, end, limit, 2 * WORDS, CAP, SHIFT, SPARE)
        least = logit_of(limit, SHIFT)
    sort_candidates(sorter, kept, rounded(peak, SHIFT), rounded(least, SHIFT), THREADS, SHIFT)
    # Twice a half is known to be even, so that pairs are stored at once.
    answers = (K // 2) * 2 if PAIRS else K
    emit_in_order(
        sorter[3], skip, peak, total, temperature, scale, row, values, indices, answers, log,
        2 * THREADS, SHIFT, SPARE,
    )  # fmt: skip
    emit_summary(lse, row_max, row, peak, total, temperature)
