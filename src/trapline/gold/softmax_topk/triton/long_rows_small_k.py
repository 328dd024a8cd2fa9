# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k, k up to 64, of thousands of long rows: one kernel does what two do in `long_rows`.

Programs that select come after programs that read later rows, and compute while those wait for
memory.
"""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import emit_summary, larger, temperature_of, wait
from trapline.gold.softmax_topk.triton.long_rows import (
    group_best,
    keep_best,
    list_exactly,
    read_split,
)
from trapline.gold.softmax_topk.triton.shared_memory import count_in
from trapline.gold.softmax_topk.triton.small_k import (
    add_several,
    emit_ranked,
    least_and_largest,
    lists_for,
)


@launched
@triton.jit(do_not_specialize=["rows"])
def clear_kernel(read, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """No row is read yet."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    tl.store(read + row, 0, mask=row < rows)


@triton.jit
def role(number, rows, lag):
    """The row of a program, and whether it selects.

    The first `lag` programs read; then one reads the next row and one selects from the row that was
    read `lag` rows before, in turn; the last `lag` select. So a program that selects waits for one
    with a lower number, which has started before it.
    """
    inner = number - lag
    selects = (inner >= 0) & (inner % 2 == 1)
    row = tl.where(selects, inner // 2, lag + inner // 2)
    row = tl.where(inner < 0, number, row)
    last = number >= 2 * rows - lag
    return tl.where(last, number - rows, row), selects | last


@triton.jit
def select_few(
    logits, temperature, maxima, peaks, totals, lists,
    values, indices, lse, row_max, row, V, K, logits_row, groups, log,
    G: tl.constexpr, WIDTH: tl.constexpr, GROUPS_BLOCK: tl.constexpr, THREADS: tl.constexpr,
    LIST: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, SHIFT: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """`select_row` in fewer instructions, for k up to 64 and rows that are not split.

    A thread holds four groups and more, GROUPS_BLOCK / THREADS.
    """
    listed, room = lists[0], lists[1]
    skip = ((row * logits_row) % WIDTH).to(tl.int32)
    base = logits + (row * logits_row // WIDTH) * WIDTH
    best, here = group_best(maxima + row * groups, V, skip, G, GROUPS_BLOCK)
    peak, total = tl.load(peaks + row), tl.load(totals + row)
    held = tl.reshape(best, [GROUPS_BLOCK // (4 * THREADS), THREADS, 4])
    each = tl.reduce(tl.reduce(held, 2, larger), 0, larger)
    least, _ = least_and_largest(lists, each, K, THREADS, SHIFT)
    add_several(listed, best, tl.arange(0, GROUPS_BLOCK), least, LIST, THREADS)
    tl.debug_barrier()
    if count_in(listed) > LIST:
        list_exactly(best, here, listed, K, THREADS, LIST, SHIFT)
    kept = keep_best(
        base, listed, room, least, skip, V, K, G, THREADS, TILE, CAP, WIDTH, SHIFT, EVEN
    )
    emit_ranked(
        lists, kept, peak, total, temperature, row, values, indices, K, log, CAP, THREADS, SHIFT
    )
    emit_summary(lse, row_max, row, peak, total, temperature)


@launched
@triton.jit(do_not_specialize=["V", "K", "logits_row", "groups", "log", "rows", "lag", "blocks"])
def stream_and_select_kernel(
    logits, temperatures, temperature, maxima, peaks, totals, rooms,
    values, indices, lse, row_max, read,
    V, K, logits_row, groups, log, rows, lag, blocks,
    G: tl.constexpr, WIDTH: tl.constexpr, GROUPS_BLOCK: tl.constexpr, THREADS: tl.constexpr,
    LIST: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, SHIFT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr, SPACE: tl.constexpr,
    PER_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both kernels for rows that are not split; `read` says which rows have been read."""
    row, selects = role(tl.program_id(0), rows, lag)
    row = row.to(tl.int64)
    wait(PDL)
    temperature = temperature_of(temperatures, temperature, row, PER_ROW)
    if selects:
        lists = lists_for(rooms, row * SPACE, LIST, CAP, THREADS, SHIFT)
        while tl.atomic_add(read + row, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.debug_barrier()
        select_few(
            logits, temperature, maxima, peaks, totals, lists, values, indices, lse, row_max, row,
            V, K, logits_row, groups, log,
            G, WIDTH, GROUPS_BLOCK, THREADS, LIST, TILE, CAP, SHIFT, EVEN,
        )  # fmt: skip
    else:
        read_split(
            logits, LOG2_E / temperature, maxima, peaks, totals, row, 0,
            V, logits_row, groups, blocks, 1, G, BLOCK, THREADS, WIDTH, SHIFT, EVEN,
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(read + row, 1, sem="release", scope="gpu")
