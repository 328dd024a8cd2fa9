# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The paged kernels: every program takes an equal share of all tiles, whatever the lengths.

Decoding reads every key and value once and computes little, so all that counts is that every
multiprocessor reads all the time. The tiles of keys of all sequences and heads are laid end to end,
and each program takes an equal run of them, by the true lengths, which only the device knows. A run
may end in the middle of a sequence; then its part is stored, and the last program that arrives with
a part of the same rows merges them all, always in the same order.
"""

import triton
import triton.language as tl

from trapline.gold.attention.paged.triton.merge import merge
from trapline.gold.attention.paged.triton.rows import attended, rows_from, store_tile

#: Sizes that change from call to call and would otherwise be compiled for again and again.
UNFIXED = ["B", "G", "R", "max_q", "window", "prefix_rows", "parts_of_prefix", "queries"]
UNFIXED += ["table_row"]


@triton.jit
def sequence(
    i, B, seq_lens, cu_q, prefix_pages, max_q, window, prefix_rows,
    P: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Of sequence i, or many: its length, first query, number of queries, and where keys begin."""
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


@triton.jit
def programs_for(pairs, work, most):
    """How many of `most` programs share the work.

    Where it costs little, as many as make every run end with a pair when all lengths are equal:
    nothing is then split that need not be, and no run starts twice.
    """
    some = tl.maximum(pairs, 1)
    even = tl.where(some >= most, tl.cdiv(some, tl.cdiv(some, most)), most // some * some)
    return tl.minimum(tl.where(4 * even >= 3 * most, even, most), work)


@triton.jit
def share_before(pid, work, programs):
    """⌊pid · work / programs⌋ without a product that leaves 32 bits."""
    return pid * (work // programs) + pid * (work % programs) // programs


@triton.jit
def owner_of(unit, work, programs, NARROW: tl.constexpr):
    """The program whose share has this unit of work."""
    if NARROW:
        owner = ((unit + 1) * programs - 1) // work
    else:
        owner = (((unit + 1).to(tl.int64) * programs - 1) // work).to(tl.int32)
    return owner


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
        first = length - new  # where the first query stands
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
            # All that this program stored comes before its arrival, and what others stored
            # before theirs comes before the merge.
            tl.debug_barrier()
            # Rows that one program has for itself need no counter, and must not touch it: it may
            # already count those that begin behind them and go on in the next program.
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
                    # The next rows of this program may take the same slot.
                    tl.debug_barrier()
        at += run


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
    """One part of the keys that a group of sequences shares, for all of the group's queries."""
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
