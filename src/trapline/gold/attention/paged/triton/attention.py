# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages in plain Triton: kernels that share all tiles equally, and their launch.

Decoding reads every key and value once and computes little, so all multiprocessors must read all
the time. The tiles of keys of all sequences and heads are laid end to end, and each program takes
an equal run of them, by the true lengths, which only the device knows. A run may end in the middle
of a sequence; then its part is stored, and the last program to finish a part of the same rows
merges them all, always in the same order.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.paged import ATTENTION_SCHEMA, PagedProblem, reference
from trapline.gold.attention.paged.triton.attend import attended, merge, rows_from, store_tile
from trapline.gold.attention.paged.triton.pages import (
    KINDS,
    in_eights,
    in_words,
    owner_of,
    programs_for,
    require,
    require_gpu,
    share_before,
    strides_of,
)
from trapline.gold.completion_counters import completion_counters
from trapline.gold.device import beside, launched, on_their_device, processors
from trapline.gold.fallback import first_that_compiles, gluon_is_tested
from trapline.gold.operators import operator, returns_nothing

#: The most rows that one program merges of a tile of several queries, all parts together.
MOST_MERGED = 1024

#: Sizes that change from call to call and must not trigger a compilation.
UNFIXED = ["B", "G", "R", "max_q", "window", "prefix_rows", "parts_of_prefix", "queries"]
UNFIXED += ["table_row"]


@triton.jit
def sequence(
    i, B, seq_lens, cu_q, prefix_pages, max_q, window, prefix_rows,
    P: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Length, first query, number of queries and first key of sequence i, or of many."""
    there = i < B
    length = tl.load(seq_lens + i, mask=there, other=0)
    begin_q = i * max_q
    new = tl.where(there, max_q, 0)
    if cu_q is not None:
        begin_q = tl.load(cu_q + i, mask=there, other=0)
        new = tl.load(cu_q + i + 1, mask=there, other=0) - begin_q
    begin = length * 0
    if prefix_pages is not None:
        begin = tl.load(prefix_pages + i // prefix_rows, mask=there, other=0) * P
    if WINDOWED:
        begin = tl.maximum(length - new - window + 1, 0) // P * P
    return length, begin_q, new, begin


@launched
@triton.jit(do_not_specialize=UNFIXED)
def attention_kernel(
    q, k_pages, v_pages, k_scale, v_scale, block_table, seq_lens, cu_q, tree, prefix_pages, out,
    parts, stats, prefix_parts, prefix_stats, counters,
    B, G, R, max_q, window, scale, softcap, prefix_rows, parts_of_prefix, queries,
    q_row, q_head, table_row, tree_row,
    k_page, k_head, k_place, v_page, v_head, v_place,
    ks_page, ks_head, ks_place, vs_page, vs_head, vs_place, out_row, out_head,
    P: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr, ALONE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, TWINS: tl.constexpr, ONE_TOP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """An equal share of all tiles. Tiles are in the order sequence, head, queries, keys.

    ONE_TOP: all queries of a sequence are one tile. NARROW: products of tiles and programs fit in
    32 bits.
    """
    i = tl.arange(0, BLOCK_B)
    lengths, _, fresh, starts = sequence(
        i, B, seq_lens, cu_q, prefix_pages, max_q, window, prefix_rows, P, WINDOWED
    )
    tiles = tl.maximum(tl.cdiv(lengths - starts, BLOCK_S), 1)
    q_tiles = tl.cdiv(fresh * R, BLOCK_M)
    ends = tl.cumsum(tiles * q_tiles, 0) * G
    work = tl.max(ends, 0)
    programs = programs_for(tl.sum(q_tiles, 0) * G, work, tl.num_programs(0))
    pid = tl.program_id(0)
    if pid >= programs:
        return
    at = share_before(pid, work, programs)
    stop = share_before(pid + 1, work, programs)
    while at < stop:
        over = ends <= at
        b = tl.sum(over.to(tl.int32), 0)
        before = tl.max(tl.where(over, ends, 0), 0)
        length, begin_q, new, begin = sequence(
            b, B, seq_lens, cu_q, prefix_pages, max_q, window, prefix_rows, P, WINDOWED
        )
        n = tl.maximum(tl.cdiv(length - begin, BLOCK_S), 1)
        pair = (at - before) // n
        tile = (at - before) % n
        g = pair
        top = 0
        if not ONE_TOP:
            tops = tl.cdiv(new * R, BLOCK_M)
            g = pair // tops
            top = pair % tops * BLOCK_M
        g = g.to(tl.int64)
        run = tl.minimum(stop - at, n - tile)

        t, row, head, live = rows_from(top, begin_q, new, g, R, BLOCK_M, ALONE)
        first = length - new  # position of the first query
        begin += tile * BLOCK_S
        peak, total, a0, a1, a2, a3 = attended(
            q, k_pages, v_pages, k_scale, v_scale, block_table + b.to(tl.int64) * table_row, tree,
            row, head, live, first + t, first, g, begin, tl.minimum(begin + run * BLOCK_S, length),
            window, scale, softcap, q_row, q_head, tree_row,
            k_page, k_head, k_place, v_page, v_head, v_place,
            ks_page, ks_head, ks_place, vs_page, vs_head, vs_place,
            P, D, WIDE, KIND, OWN, BLOCK_M, BLOCK_S, ALONE, WINDOWED, CAPPED, PRECISION, TWINS,
        )  # fmt: skip
        whole = run == n
        if prefix_parts is not None:
            whole = run < 0
        if whole:
            factor = 1.0 / tl.where(total == 0.0, 1.0, total)
            by_row = row * out_row + head * out_head
            store_tile(out, a0, a1, a2, a3, factor, live, by_row, D, WIDE, KIND)
        else:
            slot = (2 * pid + tl.where(tile == 0, 1, 0)) * BLOCK_M
            slot = slot.to(tl.int64) + tl.arange(0, BLOCK_M)
            ones = tl.full([BLOCK_M], 1.0, tl.float32)
            store_tile(parts, a0, a1, a2, a3, ones, live, slot * D, D, WIDE, KIND)
            tl.store(stats + slot * 2, peak, mask=live)
            tl.store(stats + slot * 2 + 1, total, mask=live)
            first_program = owner_of(at - tile, work, programs, NARROW)
            last_program = owner_of(at - tile + n - 1, work, programs, NARROW)
            # This program's stores come before its count, and those of others before the merge.
            tl.debug_barrier()
            # Rows of one program alone must not touch the counter: it may already count the rows
            # that follow them and continue in the next program.
            arrived = last_program - first_program
            if run < n:
                arrived = tl.atomic_add(counters + first_program, 1, sem="acq_rel")
            if arrived == last_program - first_program:
                merge(
                    parts, stats, prefix_parts, prefix_stats, out, first_program, last_program,
                    begin_q, top, tl.minimum(new * R - top, BLOCK_M), g, R, G * R, queries,
                    parts_of_prefix, out_row, out_head, D, BLOCK_D, BLOCK_M, ROWS, ALONE,
                )  # fmt: skip
                if run < n:
                    tl.store(counters + first_program, 0)
                if prefix_parts is not None:
                    # The next rows of this program may use the same slot.
                    tl.debug_barrier()
        at += run


@launched
@triton.jit(do_not_specialize=UNFIXED)
def prefix_kernel(
    q, k_pages, v_pages, k_scale, v_scale, block_table, cu_q, prefix_pages, parts, stats,
    G, R, max_q, scale, softcap, prefix_rows, parts_of_prefix, queries,
    q_row, q_head, table_row,
    k_page, k_head, k_place, v_page, v_head, v_place,
    ks_page, ks_head, ks_place, vs_page, vs_head, vs_place,
    P: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    TWINS: tl.constexpr,
):  # fmt: skip
    """One part of the keys that a group of sequences shares, for all queries of the group."""
    group = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    part = tl.program_id(2)
    b = group * prefix_rows
    begin_q = b * max_q
    new = prefix_rows * max_q
    if cu_q is not None:
        begin_q = tl.load(cu_q + b)
        new = tl.load(cu_q + b + prefix_rows) - begin_q
    top = tl.program_id(1) * BLOCK_M
    if top >= new * R:
        return
    length = tl.load(prefix_pages + group) * P
    run = tl.cdiv(tl.cdiv(length, parts_of_prefix), BLOCK_S) * BLOCK_S
    t, row, head, live = rows_from(top, begin_q, new, g, R, BLOCK_M, False)
    peak, total, a0, a1, a2, a3 = attended(
        q, k_pages, v_pages, k_scale, v_scale, block_table + b.to(tl.int64) * table_row, None,
        row, head, live, length + t, length, g, part * run, tl.minimum((part + 1) * run, length),
        0, scale, softcap, q_row, q_head, 0,
        k_page, k_head, k_place, v_page, v_head, v_place,
        ks_page, ks_head, ks_place, vs_page, vs_head, vs_place,
        P, D, WIDE, KIND, OWN, BLOCK_M, BLOCK_S, True, False, CAPPED, PRECISION, TWINS,
    )  # fmt: skip
    slot = (part.to(tl.int64) * queries + row) * (G * R) + head
    ones = tl.full([BLOCK_M], 1.0, tl.float32)
    store_tile(parts, a0, a1, a2, a3, ones, live, slot * D, D, WIDE, KIND)
    tl.store(stats + slot * 2, peak, mask=live)
    tl.store(stats + slot * 2 + 1, total, mask=live)


class PagedTiles(NamedTuple):
    """Rows of queries and positions of a tile, and the resources of a program."""

    rows: int
    positions: int
    warps: int = 4
    stages: int = 3
    #: Programs per multiprocessor.
    programs: int = 2
    #: Limit on registers per thread; None leaves it to the compiler.
    registers: int | None = None


def tiles_for(
    rows: int, D: int, dtype: torch.dtype, kind: int, *, many: bool = False
) -> PagedTiles:
    """Tiles for this many rows (query heads per key/value head times queries) per sequence.

    `many`: there are enough tiles of 128 rows for half of the multiprocessors. The tests compile
    and check every result.
    """
    if many and rows > 64 and dtype != torch.float32 and kind == 0 and D <= 128:
        return PagedTiles(128, 64, warps=8, programs=1)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        return PagedTiles(block_m, 32, stages=2)
    if D > 128:
        return PagedTiles(block_m, 32 if kind == 0 else 64)
    if block_m > 16 or kind == 0:
        return PagedTiles(block_m, 64)
    # Codes are read quickly: keeping a multiprocessor busy takes more warps, and a limit on their
    # registers. Measured at D = 128; narrower heads were checked only.
    if kind == KINDS[torch.uint8]:
        if D > 96:
            return PagedTiles(block_m, 64, warps=2, programs=6, registers=168)
        return PagedTiles(block_m, 128, programs=4, registers=128)
    if D > 96:
        return PagedTiles(block_m, 128, programs=3, registers=168)
    return PagedTiles(block_m, 64, programs=4, registers=128)


class KernelInputs(NamedTuple):
    """Tensors that both kernels read, and their strides."""

    q: Tensor
    k_words: Tensor
    v_words: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor

    @property
    def query_strides(self) -> tuple[int, ...]:
        return (self.q.stride(0), self.q.stride(1), self.block_table.stride(0))

    @property
    def page_strides(self) -> tuple[int, ...]:
        pages = (*self.k_words.stride()[:3], *self.v_words.stride()[:3])
        return (*pages, *strides_of(self.k_scale), *strides_of(self.v_scale))


def fixed_for(q: Tensor, k_pages: Tensor, v_pages: Tensor, kind: int, softcap: float) -> Any:
    """Compile-time arguments of both kernels."""
    D = q.shape[-1]
    return {
        "P": k_pages.shape[2],
        "D": D,
        "WIDE": max(16, triton.next_power_of_2(D if kind == 0 else D // 4)),
        "KIND": kind,
        "OWN": q.is_cuda,
        "CAPPED": softcap > 0.0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "TWINS": k_pages.stride() == v_pages.stride(),
    }


@operator("trapline_paged_kernels", ATTENTION_SCHEMA, returns_nothing)
@on_their_device
def attention_operator(*arguments: Any) -> None:
    """Write the attention of a `PagedProblem`, whose fields are the arguments, to its `out`."""
    problem = PagedProblem(*arguments)
    require_gpu(problem.q)
    attention(problem)


def attention(problem: PagedProblem) -> None:
    """Launch the Hopper kernel if it supports the problem, and these kernels otherwise.

    The next tier serves if the kernels of one do not compile.
    """
    q, k_pages, v_pages, out = problem.q, problem.k_pages, problem.v_pages, problem.out
    require(q, k_pages, v_pages)
    require(out)
    if not len(q):
        return
    block_table, seq_lens = beside(problem.block_table), beside(problem.seq_lens)
    if block_table is not problem.block_table or seq_lens is not problem.seq_lens:
        problem = problem._replace(block_table=block_table, seq_lens=seq_lens)
    kind = KINDS.get(k_pages.dtype, 0)
    tiers = {"triton": partial(_by_triton, problem, kind)}
    if gluon_is_tested():
        from trapline.gold.attention.paged.hopper import decode

        if decode.supports(problem, kind) is None:
            tiers = {"hopper": partial(decode.decode, problem, kind), **tiers}
    tiers["torch"] = partial(reference.attention, problem)
    first_that_compiles("paged attention", tiers)


def _by_triton(problem: PagedProblem, kind: int) -> None:
    q, k_pages, v_pages = problem.q, problem.k_pages, problem.v_pages
    cu_q, prefix_pages = (
        x if x is None else beside(x) for x in (problem.cu_q, problem.prefix_pages)
    )
    words = in_words(k_pages, kind), in_words(v_pages, kind)
    given = KernelInputs(q, *words, problem.k_scale, problem.v_scale, problem.block_table)
    fixed = fixed_for(q, k_pages, v_pages, kind, problem.softcap)
    if prefix_pages is None or problem.window:
        prefix_pages = prefix_parts = prefix_stats = None
    else:
        prefix_parts, prefix_stats = over_prefix(problem, given, cu_q, prefix_pages, fixed)
    launch(problem, given, fixed, cu_q, (prefix_pages, prefix_parts, prefix_stats))


def launch(
    problem: PagedProblem, given: KernelInputs, fixed: Any, cu_q: Tensor | None, prefix: Any
) -> None:
    """Launch the kernel that shares all tiles equally among its programs."""
    q, max_q, window, out = problem.q, problem.max_q, problem.window, problem.out
    (queries, H, D), (_, G, P, _) = q.shape, problem.k_pages.shape
    B, R = len(problem.seq_lens), H // G
    tree = None if problem.tree_mask is None else in_eights(problem.tree_mask)
    prefix_pages, prefix_parts, prefix_stats = prefix
    many = 2 * B * G * cdiv(R * max_q, 128) >= processors(q)
    tiles = tiles_for(R * max_q, D, q.dtype, fixed["KIND"], many=many)
    tops = cdiv(R * max_q, tiles.rows)
    most = processors(q) * tiles.programs
    if max_q > 1:
        most = min(most, MOST_MERGED // tiles.rows * B * G * tops)
    units = B * G * tops * (cdiv(problem.block_table.shape[1] * P, tiles.positions) + 1)
    parts = q.new_empty((2 * most, tiles.rows, D), dtype=torch.float32)
    stats = q.new_empty((2 * most, tiles.rows, 2), dtype=torch.float32)
    attention_kernel[(most,)](
        *(*given, problem.seq_lens, cu_q, tree, prefix_pages, out),
        *(parts, stats, prefix_parts, prefix_stats, completion_counters(most, q)),
        *(B, G, R, max_q, window, problem.scale, problem.softcap, problem.prefix_rows),
        *(0 if prefix_parts is None else len(prefix_parts), queries, *given.query_strides),
        0 if tree is None else tree.stride(0),
        *(*given.page_strides, *out.stride()[:2]),
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_M=tiles.rows,
        BLOCK_S=tiles.positions,
        BLOCK_B=max(32, triton.next_power_of_2(B)),
        ROWS=merged_at_once(R * max_q, D, tiles, alone=max_q == 1),
        ALONE=max_q == 1,
        WINDOWED=window > 0,
        ONE_TOP=tops == 1,
        NARROW=units * most < 2**31,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **fixed,
    )


def merged_at_once(rows: int, D: int, tiles: PagedTiles, *, alone: bool) -> int:
    """Rows of a tile that are merged at a time: as many as registers hold of five parts."""
    held = (1024 if alone else 4096) // triton.next_power_of_2(D)
    return int(min(tiles.rows, triton.next_power_of_2(rows), held))


def over_prefix(
    problem: PagedProblem,
    given: KernelInputs,
    cu_q: Tensor | None,
    prefix_pages: Tensor,
    fixed: Any,
) -> tuple[Tensor, Tensor]:
    """Parts of all queries over their group's prefix, (parts, queries, H, D), and statistics."""
    q, max_q, prefix_rows = given.q, problem.max_q, problem.prefix_rows
    (queries, H, D), G = q.shape, problem.k_pages.shape[1]
    R = H // G
    rules = G, R, max_q, problem.scale, problem.softcap, prefix_rows
    rows = R * max_q * prefix_rows
    tiles = tiles_for(rows, D, q.dtype, fixed["KIND"])
    grid = len(prefix_pages) * G, cdiv(rows, tiles.rows)
    programs = max(grid[0] * grid[1], 1)
    count = max(1, min(processors(q) * tiles.programs // programs, 32))
    parts = q.new_empty((count, queries, H, D), dtype=torch.float32)
    stats = q.new_empty((count, queries, H, 2), dtype=torch.float32)
    prefix_kernel[(*grid, count)](
        *(*given, cu_q, prefix_pages, parts, stats, *rules, count, queries),
        *(*given.query_strides, *given.page_strides),
        BLOCK_M=tiles.rows,
        BLOCK_S=tiles.positions,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **fixed,
    )
    return parts, stats
