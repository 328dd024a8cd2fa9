# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k, k up to 64, of many short rows: one program of four warps per row.

It reads the row once and leaves the maximum of every chunk of 16 bytes in shared memory. The
threshold comes from the largest logits of its threads; only chunks that reach it are read again.
"""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import (
    emit_summary,
    origin_of,
    temperature_of,
    wait,
)
from trapline.gold.softmax_topk.triton.many_rows import (
    keep_exactly_again,
    keep_reached,
    read_chunks,
)
from trapline.gold.softmax_topk.triton.packed import (
    words_of,
)
from trapline.gold.softmax_topk.triton.shared_memory import count_in, pair, space
from trapline.gold.softmax_topk.triton.small_k import (
    emit_ranked,
    keep_words,
    least_and_largest,
    list_stored,
    lists_for,
    put_sums_of_warps,
    sum_of_warps,
)


@launched
@triton.jit(do_not_specialize=["V", "K", "logits_row", "log"])
def many_small_k_kernel(
    logits, temperatures, temperature, rooms, values, indices, lse, row_max,
    V, K, logits_row, log,
    WORDS: tl.constexpr, THREADS: tl.constexpr, NUMBERS: tl.constexpr, LISTED: tl.constexpr,
    CAP: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr, SPACE: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NUMBERS chunks of the row belong to each thread. EVEN: rows begin and end with a chunk."""
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    WIDTH: tl.constexpr = 4 * PER
    row = tl.program_id(0).to(tl.int64)
    skip = 0 if EVEN else ((row * logits_row) % WIDTH).to(tl.int32)
    base = logits + (row * logits_row // WIDTH) * WIDTH
    words = words_of(base)
    end = V + skip
    at = row * (SPACE + NUMBERS * THREADS)
    lists = lists_for(rooms, at, LISTED, CAP, THREADS, SHIFT)
    listed, room = lists[0], lists[1]
    maxima = space(rooms, at + SPACE, 4 * NUMBERS * THREADS)
    wait(PDL)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    scale = LOG2_E / temperature
    each, share = read_chunks(words, maxima, skip, end, scale, WORDS, THREADS, SHIFT, EVEN)
    least, peak = least_and_largest(lists, each, K, THREADS, SHIFT)
    put_sums_of_warps(lists, share * tl.exp2((each - origin_of(peak)) * scale), THREADS)
    list_stored(listed, maxima, least, NUMBERS, THREADS, LISTED)
    tl.debug_barrier()
    total = sum_of_warps(lists, THREADS)
    count = count_in(listed)
    if count > LISTED:
        keep_reached(room, words, skip, V, least, WORDS, CAP, THREADS, SHIFT, EVEN)
    else:
        for first in range(0, count, THREADS):
            slot = first + tl.arange(0, THREADS)
            number = tl.where(slot < count, pair(listed, slot)[1], 0)
            chunk = number[:, None] * 4 + tl.arange(0, 4)[None, :]
            inside = (slot < count)[:, None]
            keep_words(room, words, chunk, inside, least, skip, V, CAP, THREADS, SHIFT, EVEN)
    tl.debug_barrier()
    kept = count_in(room)
    if kept > CAP:
        keep_exactly_again(room, base, skip, end, K, PER * WORDS, CAP, THREADS, WIDTH, SHIFT)
        kept = K
    emit_ranked(
        lists, kept, peak, total, temperature, row, values, indices, K, log, CAP, THREADS, SHIFT
    )
    emit_summary(lse, row_max, row, peak, total, temperature)
