# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
"""Decoding over pages on Hopper GPUs, in Gluon: programs of one warp, fed by the copy engine.

The work is shared as in `triton.attention`, with the same recurrence, for the common case: one
query per sequence, few query heads per key/value head, no window, no cap. A single warp never waits
for another one, and a few of them keep a multiprocessor's memory busy.

A launch may start while the previous kernel runs. Until that is done, lengths and tables may
change, and what is read of them is a guess: it decides which lines to prefetch into the L2 cache.
The share of work that follows from it is kept if the lengths turn out to be the same, and computed
again if not. Launches that start late make no guess.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.paged import PagedProblem
from trapline.gold.attention.paged.hopper.attend import attended_in_columns, attended_in_rows
from trapline.gold.attention.paged.hopper.pages import (
    LARGEST,
    merge,
    prefetch,
    prefetch_where,
    ring_for,
    store_rows,
    together,
    whole,
)
from trapline.gold.attention.paged.triton.pages import (
    FP8,
    INT4,
    INT8,
    owner_of,
    programs_for,
    share_before,
    strides_of,
)
from trapline.gold.completion_counters import completion_counters
from trapline.gold.device import launched, processors

#: Sizes that change from call to call and must not trigger a compilation.
UNFIXED = ["B", "G", "R", "table_row", "width"]
#: A line of the L2 cache, in bytes.
LINE = gl.constexpr(128)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def lengths_of(seq_lens, B, BLOCK_B: gl.constexpr):
    i = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([BLOCK_B // 32], [32], [1], [0]))
    # Not through this multiprocessor's cache, which would return the first value again.
    return gl.load(seq_lens + i, mask=i < B, other=0, cache_modifier=".cg")


@gluon.jit
def share_of(pid, lengths, B, G, S: gl.constexpr):
    """Ends of the sequences' tiles, number of tiles and programs, and this program's run."""
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
    """Sequence, head and tile of a unit of work; tiles and length of the sequence."""
    over = ends <= at
    b = gl.sum(over.to(gl.int32), 0)
    before = gl.max(gl.where(over, ends, 0), 0)
    i = gl.arange(0, lengths.shape[0], layout=lengths.type.layout)
    length = gl.sum(gl.where(i == b, lengths, 0), 0)
    n = gl.maximum(gl.cdiv(length, S), 1)
    return b, (at - before) // n, (at - before) % n, n, length


@gluon.jit
def prefetch_inputs(pid, counters, seq_lens, block_table, q, B, G, table_row, q_row):
    """Prefetch a line each of what all programs read."""
    WORDS: gl.constexpr = LINE // 4
    HALVES: gl.constexpr = LINE // 2
    if pid < B * G:  # there are as many counters, or one per program
        prefetch(counters + pid)
    prefetch(seq_lens)
    if pid * WORDS <= (B - 1) * table_row:
        prefetch(block_table + pid * WORDS)
    if pid * HALVES <= (B - 1) * q_row:
        prefetch(q + pid * HALVES)


@gluon.jit
def prefetch_rows(base, pages, page, g, place, wanted, BYTES: gl.constexpr):
    """Prefetch rows of one head, BYTES each, on known pages."""
    by_page, by_head, by_place, _ = pages.strides
    at = base + page * by_page + g * by_head + place * by_place
    PER_LINE: gl.constexpr = LINE * 8 // base.dtype.element_ty.primitive_bitwidth
    for line in gl.static_range((BYTES + LINE - 1) // LINE):
        prefetch_where(at + line * PER_LINE, wanted)


@gluon.jit
def prefetch_tiles(
    pages, keys, values, block_table, place, left, B, G, table_row, width,
    P: gl.constexpr, S: gl.constexpr, BYTES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Prefetch the first AHEAD positions of a run of `left` tiles, by current lengths and table.

    Both may still change, so only addresses within the pages are used. Returns the addresses read
    in the table, and the values found.
    """
    b, g, tile, _, length = place
    s = tile * S + gl.arange(0, AHEAD, layout=gl.BlockedLayout([1], [32], [1], [0]))
    there = (b < B) & (s >= 0) & (s < gl.minimum(length, (tile + left) * S)) & (s // P < width)
    at = block_table + b.to(gl.int64) * table_row + s // P
    number = gl.load(at, mask=there, other=-1, cache_modifier=".cg")
    page = number.to(gl.int64)
    known = (page >= 0) & (page < pages[0].shape[0]) & (g >= 0) & (g < G)
    prefetch_rows(keys, pages[0], page, g, s % P, known, BYTES)
    prefetch_rows(values, pages[1], page, g, s % P, known, BYTES)
    return at, there, number


@gluon.jit
def share_when_due(pid, seq_lens, B, G, S: gl.constexpr, BLOCK_B: gl.constexpr):
    """Wait for the previous kernel; return lengths, share and place of this program."""
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
    """The same, guessed and prefetched while the previous kernel still runs."""
    guess = lengths_of(seq_lens, B, BLOCK_B)
    ends, work, programs, at, stop = share_of(pid, guess, B, G, S)
    b, g, tile, n, length = place_of(guess, ends, at, S)
    looked, there, number = prefetch_tiles(
        pages, keys, values, block_table, (b, g, tile, n, length), stop - at, B, G, table_row,
        width, P, S, BYTES, AHEAD,
    )  # fmt: skip
    gdc_wait()
    lengths = lengths_of(seq_lens, B, BLOCK_B)
    # Together with the lengths: the first tiles find their page numbers in this multiprocessor's
    # cache, and there is one wait for memory.
    again = gl.load(looked, mask=there, other=-1)
    moved = gl.max((lengths != guess).to(gl.int32), 0) | gl.max((again != number).to(gl.int32), 0)
    if moved != 0:
        ends, work, programs, at, stop = share_of(pid, lengths, B, G, S)
        b, g, tile, n, length = place_of(lengths, ends, at, S)
    return lengths, (ends, work, programs, at, stop), (b, g, tile, n, length)


@launched
@gluon.jit(do_not_specialize=UNFIXED)
def decode_kernel(
    k_pages, v_pages, keys, values, q, k_scale, v_scale, block_table, seq_lens, out, parts, stats,
    counters, B, G, R, scale, q_row, q_head, table_row, width,
    ks_page, ks_head, ks_place, vs_page, vs_head, vs_place, out_row, out_head,
    P: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr, S: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr,
    NARROW: gl.constexpr, BY_PAIR: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """An equal share of all tiles, in the order sequence, head, keys.

    k_pages and v_pages are descriptors, keys and values the same pages as pointers. S: positions of
    a tile. STAGES: tiles in the ring. AHEAD: positions prefetched before the previous kernel is
    done. ROWS: at least R. NARROW: products of tiles and programs fit in 32 bits. BY_PAIR: there is
    a counter per sequence and head; otherwise one per program. EARLY: the next launch may start at
    once, not when the last run ends.
    """
    pages = k_pages, v_pages
    ring = ring_for(pages, HALVES * S // k_pages.block_type.shape[2], STAGES)
    pid = gl.program_id(0)
    prefetch_inputs(pid, counters, seq_lens, block_table, q, B, G, table_row, q_row)
    if EARLY:
        gdc_launch_dependents()
    if AHEAD > 0:
        BYTES: gl.constexpr = HALVES * k_pages.block_type.nbytes // k_pages.block_type.shape[2]
        lengths, share, place = share_by_guess(
            pid, pages, keys, values, block_table, seq_lens, B, G, table_row, width,
            P, S, BYTES, AHEAD, BLOCK_B,
        )  # fmt: skip
    else:
        lengths, share, place = share_when_due(pid, seq_lens, B, G, S, BLOCK_B)
    ends, work, programs, at, stop = share
    b, g, tile, n, length = place
    done = 0
    while at < stop:
        run = gl.minimum(stop - at, n - tile)
        row = b.to(gl.int64)
        # Pages without codes have no scales.
        scales = (
            k_scale + g.to(gl.int64) * ks_head if KIND > 0 else k_scale,
            v_scale + g.to(gl.int64) * vs_head if KIND > 0 else v_scale,
            ks_page, ks_place, vs_page, vs_place,
        )  # fmt: skip
        given = q + row * q_row + g * R * q_head, block_table + row * table_row, pages, ring, scales
        end = gl.minimum((tile + run) * S, length)
        if whole(KIND):
            peak, total, sums, done = attended_in_rows(
                *given, g, R, tile * S, end, done, scale, q_head, P, D, KIND, S
            )
        else:
            peak, total, sums, done = attended_in_columns(
                *given, g, R, tile * S, end, done, scale, q_head, P, D, KIND, HALVES, S
            )
        if not EARLY and at + run >= stop:
            gdc_launch_dependents()
        M: gl.constexpr = peak.shape[0]
        r = gl.arange(0, M, layout=peak.type.layout)
        unit = gl.full_like(peak, 1.0 / LARGEST if whole(KIND) else 1.0)
        if KIND == INT4:
            unit /= 16.0
        answer = row * out_row + g * R * out_head
        if run == n:
            unit /= gl.where(total == 0.0, 1.0, total)
            heads = answer + r.to(gl.int64) * out_head
            store_rows(out, sums, unit, r < R, heads, D, KIND, HALVES)
        else:
            slot = (2 * pid + gl.where(tile == 0, 1, 0)).to(gl.int64) * M + r
            store_rows(parts, sums, unit, r < R, slot * D, D, KIND, HALVES)
            gl.store(stats + slot * 2, peak, mask=r < R)
            gl.store(stats + slot * 2 + 1, total, mask=r < R)
            first = owner_of(at - tile, work, programs, NARROW)
            last = owner_of(at - tile + n - 1, work, programs, NARROW)
            # This program's stores come before its count, and those of others before the merge.
            together()
            counter = counters + (b * G + g if BY_PAIR else first)
            arrived = gl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == last - first:
                merge(parts, stats, out, first, last, answer, R, out_head, D, M, ROWS)
                gl.store(counter, 0)
        at += run
        if at < stop:
            b, g, tile, n, length = place_of(lengths, ends, at, S)


class DecodeConfig(NamedTuple):
    """Positions of a tile, tiles in the ring, programs per multiprocessor."""

    positions: int
    stages: int
    programs: int
    #: Whether the next launch may start when this one begins.
    early: bool = False
    #: Positions prefetched into the L2 cache while the previous kernel still runs; 0 is none.
    ahead: int = 0


#: (kind of pages, head width) → config. Measured at D = 128 and, for 16 bits, at 64.
CONFIGS = {
    (0, 64): DecodeConfig(64, 3, 4, early=True, ahead=32),
    (0, 128): DecodeConfig(32, 3, 4, early=True, ahead=32),
    (int(INT8), 64): DecodeConfig(64, 3, 8),
    (int(INT8), 128): DecodeConfig(64, 3, 4),
    (int(FP8), 128): DecodeConfig(64, 3, 4),
    (int(INT4), 64): DecodeConfig(64, 3, 8),
    (int(INT4), 128): DecodeConfig(64, 3, 8),
}
#: For 16 bits and more than four query heads per key/value head: fewer, larger parts.
TALL = DecodeConfig(32, 6, 2, early=True, ahead=32)
#: The most parts of a row: one warp merges them, and more would cost more than they save.
MOST_PARTS = 16
#: The most query heads per key/value head: the columns of a tile, or half of its rows.
MOST_HEADS = 8
#: The most sequences whose lengths one warp adds up.
MOST_ROWS = 1024
#: Bytes of 16-bit pages up to which this kernel is faster: it starts and ends sooner.
SMALL = 128 << 20


def config_for(kind: int, D: int, R: int) -> DecodeConfig | None:
    """The configuration, or None for pages and heads that the kernel does not support."""
    if (kind, D) not in CONFIGS or MOST_HEADS < R:
        return None
    return TALL if kind == 0 and D == 128 and R > 4 else CONFIGS[kind, D]


def supports(problem: PagedProblem, kind: int) -> str | None:
    """None, or the reason why this kernel does not compute the problem, or is slower there."""
    q, k_pages, v_pages = problem.q, problem.k_pages, problem.v_pages
    (_, H, D), (_, G, P, _), (B, width) = q.shape, k_pages.shape, problem.block_table.shape
    optional = problem.cu_q, problem.tree_mask, problem.prefix_pages
    if problem.max_q > 1 or any(x is not None for x in optional):
        return "anything but one query per sequence"
    if problem.window or problem.softcap:
        return "a sliding window" if problem.window else "a softcap"
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "this device (compute capability 9.0 is required)"
    if q.dtype not in (torch.bfloat16, torch.float16) or config_for(kind, D, H // G) is None:
        return f"{q.dtype}, heads {D} wide, {H // G} query heads per key/value head"
    # Only the device knows the lengths: the table bounds them.
    if kind == 0 and (k_pages.dtype != q.dtype or 4 * B * G * width * P * D > SMALL):
        return "more 16-bit pages than it reads fast"
    # Two programs per multiprocessor at least: fewer would not keep the memory busy.
    if B > MOST_ROWS or 2 * processors(q) > MOST_PARTS * B * G:
        return f"{B} sequences"
    if P % 16 or not (fits(k_pages) and fits(v_pages)):
        return "pages whose sizes, strides or addresses are not multiples of 16"
    return None


def fits(pages: Tensor) -> bool:
    """Whether the copy engine can read the pages: not empty, strides of whole 16 bytes."""
    steps = [n * pages.element_size() for n in pages.stride()[:-1]]
    return (
        pages.numel() > 0
        and pages.data_ptr() % 16 == 0
        and all(n > 0 and n % 16 == 0 for n in steps)
    )


@cache
def box_layout(columns: int, bits: int) -> gl.NVMMASharedLayout:
    """The layout of a box in shared memory, swizzled for the copy engine and `ldmatrix`."""
    return gl.NVMMASharedLayout(columns * bits // 8, bits, 4)


def box_of(kind: int, D: int, P: int, S: int) -> list[int]:
    """Positions and columns fetched at once: of one page, up to 128 bytes of a row."""
    columns = {0: 64, int(INT4): D // 2}.get(kind, D)
    return [1, 1, math.gcd(P, S), columns]


def descriptor(pages: Tensor, kind: int, D: int, S: int) -> TensorDescriptor:
    x = pages.view(torch.int8) if kind else pages
    box = box_of(kind, D, x.shape[2], S)
    layout = box_layout(box[3], 8 * x.element_size())
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def constants(kind: int, D: int, P: int, R: int, B: int, config: DecodeConfig) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "P": P,
        "D": D,
        "KIND": kind,
        "HALVES": 2 if kind == 0 and D == 128 else 1,
        "S": config.positions,
        "STAGES": config.stages,
        "AHEAD": config.ahead,
        "BLOCK_B": max(32, triton.next_power_of_2(B)),
        "ROWS": triton.next_power_of_2(R),
        "EARLY": config.early,
    }


def decode(problem: PagedProblem, kind: int) -> None:
    """One query per sequence, for a problem that `supports` accepts."""
    q, k_pages, v_pages, out = problem.q, problem.k_pages, problem.v_pages, problem.out
    block_table, scales = problem.block_table, (problem.k_scale, problem.v_scale)
    (B, H, D), (_, G, P, _) = q.shape, k_pages.shape
    config = config_for(kind, D, H // G)
    assert config is not None
    most = min(processors(q) * config.programs, MOST_PARTS * B * G)
    units = B * G * (cdiv(block_table.shape[1] * P, config.positions) + 1)
    parts = q.new_empty((2 * most, MOST_HEADS, D), dtype=torch.float32)
    stats = q.new_empty((2 * most, MOST_HEADS, 2), dtype=torch.float32)
    decode_kernel[(most,)](
        *(descriptor(x, kind, D, config.positions) for x in (k_pages, v_pages)),
        *(x.view(torch.int8) if kind else x for x in (k_pages, v_pages)),
        *(q, *scales, block_table, problem.seq_lens, out, parts, stats),
        completion_counters(min(B * G, most), q),
        *(B, G, H // G, problem.scale, *q.stride()[:2], block_table.stride(0)),
        *(block_table.shape[1], *strides_of(scales[0]), *strides_of(scales[1]), *out.stride()[:2]),
        **constants(kind, D, P, H // G, B, config),
        NARROW=units * most < 2**31,
        BY_PAIR=most >= B * G,
        num_warps=1,
        launch_pdl=True,
    )
