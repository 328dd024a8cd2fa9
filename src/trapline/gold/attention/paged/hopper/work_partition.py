# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Whose tiles are whose in Hopper's decoding over pages, and asking for them early (Gluon).

A launch may come in while the kernel before it runs. Until that one is done, lengths and tables may
still change: what is read of them then serves as a guess. The guess says which lines of the L2
cache to ask for; the share of work that follows from it is kept if the lengths prove to be the
same, and computed again if not. Launches that come in late have no time for guesses.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from trapline.gold.attention.paged.hopper.ring import prefetch, prefetch_where
from trapline.gold.attention.paged.triton.work_partition import programs_for, share_before

#: A line of the L2 cache, in bytes.
LINE = gl.constexpr(128)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def lengths_of(seq_lens, B, BLOCK_B: gl.constexpr):
    i = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([BLOCK_B // 32], [32], [1], [0]))
    # Past this multiprocessor's own cache, which would answer the second time what it had before.
    return gl.load(seq_lens + i, mask=i < B, other=0, cache_modifier=".cg")


@gluon.jit
def share_of(pid, lengths, B, G, S: gl.constexpr):
    """Where each sequence's tiles end, how many there are, who shares them, and this one's run."""
    i = gl.arange(0, lengths.shape[0], layout=lengths.type.layout)
    tiles = gl.where(i < B, gl.maximum(gl.cdiv(lengths, S), 1), 0)
    ends = gl.associative_scan(tiles, 0, plus) * G
    work = gl.max(ends, 0)
    programs = programs_for(B * G, work, gl.num_programs(0))
    at = share_before(pid, work, programs)
    stop = gl.where(pid < programs, share_before(pid + 1, work, programs), at)
    return ends, work, programs, at, stop


@gluon.jit
def place_of(lengths, ends, at, S: gl.constexpr):
    """Sequence, head and tile of a unit of work; tiles and positions that a head has there."""
    over = ends <= at
    b = gl.sum(over.to(gl.int32), 0)
    before = gl.max(gl.where(over, ends, 0), 0)
    i = gl.arange(0, lengths.shape[0], layout=lengths.type.layout)
    length = gl.sum(gl.where(i == b, lengths, 0), 0)
    n = gl.maximum(gl.cdiv(length, S), 1)
    return b, (at - before) // n, (at - before) % n, n, length


@gluon.jit
def ask_for_inputs(pid, counters, seq_lens, block_table, q, B, G, table_row, q_row):
    """A line each of what all programs read, whatever is or will be in it."""
    WORDS: gl.constexpr = LINE // 4
    HALVES: gl.constexpr = LINE // 2
    if pid < B * G:  # there are as many counters, or one a program
        prefetch(counters + pid)
    prefetch(seq_lens)
    if pid * WORDS <= (B - 1) * table_row:
        prefetch(block_table + pid * WORDS)
    if pid * HALVES <= (B - 1) * q_row:
        prefetch(q + pid * HALVES)


@gluon.jit
def ask_for_rows(base, pages, page, g, place, wanted, BYTES: gl.constexpr):
    """The lines of rows of one head, BYTES each, on pages that are known."""
    by_page, by_head, by_place, _ = pages.strides
    at = base + page * by_page + g * by_head + place * by_place
    PER_LINE: gl.constexpr = LINE * 8 // base.dtype.element_ty.primitive_bitwidth
    for line in gl.static_range((BYTES + LINE - 1) // LINE):
        prefetch_where(at + line * PER_LINE, wanted)


@gluon.jit
def ask_for_tiles(
    pages, keys, values, block_table, place, left, B, G, table_row, width,
    P: gl.constexpr, S: gl.constexpr, BYTES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """The first AHEAD positions of a run of `left` tiles, by what lengths and table say now.

    They are not trusted: whatever they say, only addresses within the pages are named. Answers
    where in the table it looked, and what it found.
    """
    b, g, tile, _, length = place
    s = tile * S + gl.arange(0, AHEAD, layout=gl.BlockedLayout([1], [32], [1], [0]))
    there = (b < B) & (s >= 0) & (s < gl.minimum(length, (tile + left) * S)) & (s // P < width)
    at = block_table + b.to(gl.int64) * table_row + s // P
    number = gl.load(at, mask=there, other=-1, cache_modifier=".cg")
    page = number.to(gl.int64)
    known = (page >= 0) & (page < pages[0].shape[0]) & (g >= 0) & (g < G)
    ask_for_rows(keys, pages[0], page, g, s % P, known, BYTES)
    ask_for_rows(values, pages[1], page, g, s % P, known, BYTES)
    return at, there, number


@gluon.jit
def share_when_due(pid, seq_lens, B, G, S: gl.constexpr, BLOCK_B: gl.constexpr):
    """Waits for the kernel before; then lengths, share and place of this program."""
    gdc_wait()
    lengths = lengths_of(seq_lens, B, BLOCK_B)
    share = share_of(pid, lengths, B, G, S)
    return lengths, share, place_of(lengths, share[0], share[3], S)


@gluon.jit
def share_by_guess(
    pid, pages, keys, values, block_table, seq_lens, B, G, table_row, width,
    P: gl.constexpr, S: gl.constexpr, BYTES: gl.constexpr, AHEAD: gl.constexpr,
    BLOCK_B: gl.constexpr,
):  # fmt: skip
    """The same, computed and asked for while the kernel before still runs."""
    guess = lengths_of(seq_lens, B, BLOCK_B)
    ends, work, programs, at, stop = share_of(pid, guess, B, G, S)
    b, g, tile, n, length = place_of(guess, ends, at, S)
    looked, there, number = ask_for_tiles(
        pages, keys, values, block_table, (b, g, tile, n, length), stop - at, B, G, table_row,
        width, P, S, BYTES, AHEAD,
    )  # fmt: skip
    gdc_wait()
    lengths = lengths_of(seq_lens, B, BLOCK_B)
    # Beside the lengths, not after them: the first tiles find their page numbers in this
    # multiprocessor's cache, and the memory is waited for once.
    again = gl.load(looked, mask=there, other=-1)
    moved = gl.max((lengths != guess).to(gl.int32), 0) | gl.max((again != number).to(gl.int32), 0)
    if moved != 0:
        ends, work, programs, at, stop = share_of(pid, lengths, B, G, S)
        b, g, tile, n, length = place_of(lengths, ends, at, S)
    return lengths, (ends, work, programs, at, stop), (b, g, tile, n, length)
