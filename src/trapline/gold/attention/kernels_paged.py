# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages in Triton: one launch, whatever the lengths.

Decoding reads every key and value once and computes little, so all that counts is that every
multiprocessor reads all the time. The tiles of keys of all sequences and heads are laid end to end,
and each program takes an equal run of them, by the true lengths, which only the device knows. A run
may end in the middle of a sequence; then its part is stored, and the last program that arrives with
a part of the same rows merges them all, always in the same order. A program serves all query heads
of a key/value head: row r = query · R + head.

The page numbers of a tile are loaded one tile ahead, so that the tile's addresses are known when
its turn comes in the pipeline of loads. Codes (`kernels_paged_codes`) are never multiplied by their
scale one by one: the key's scale goes to its column of scores, the value's to its column of
weights. Nothing beyond a sequence's length is loaded, so whatever lies there cannot leak. Offsets
are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.attention import fast_paged
from trapline.gold.attention.arrivals import arrivals
from trapline.gold.attention.kernels_paged_append import append, strides_of
from trapline.gold.attention.kernels_paged_codes import INT4, log2_of, pieces_of
from trapline.gold.attention.kernels_tiles import LOG2_E, scored
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.kernels_device import processors

KERNELS = "trapline_paged_kernels"
WIDEST = 256
#: The smallest float16. A scale of 0 counts as this, so that its logarithm is finite.
SMALLEST = tl.constexpr(2.0**-24)
#: Sizes that change from call to call and would otherwise be compiled for again and again.
UNFIXED = [
    "B",
    "G",
    "R",
    "max_q",
    "window",
    "prefix_rows",
    "parts_of_prefix",
    "queries",
    "table_row",
]


@triton.jit
def rows_from(top, begin_q, new, g, R, BLOCK_M: tl.constexpr, ALONE: tl.constexpr):
    """Of a tile of rows: queries within the sequence and among all, heads, and which are there."""
    r = top + tl.arange(0, BLOCK_M)
    if ALONE:
        t = r * 0
        head = g * R + r
        live = r < R * new
    else:
        t = r // R
        head = g * R + r % R
        live = t < new
    return t, (begin_q + t).to(tl.int64), head, live


@triton.jit
def query_rows(
    q, row, head, live, q_row, q_head, D: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """A tile of queries; where pages hold codes, its four pieces as the words order them."""
    d = tl.arange(0, WIDE)
    base = q + row[:, None] * q_row + head[:, None] * q_head
    if KIND == 0:
        mask = live[:, None] & (d < D)[None, :]
        q0 = tl.load(base + d[None, :], mask=mask, other=0.0)
        q1, q2, q3 = q0, q0, q0
    else:
        mask = live[:, None] & (d < D // 4)[None, :]
        step: tl.constexpr = 2 if KIND == INT4 else 4
        to_second: tl.constexpr = D // 2 if KIND == INT4 else 1
        to_third: tl.constexpr = 1 if KIND == INT4 else 2
        at = base + step * d[None, :]
        q0 = tl.load(at, mask=mask, other=0.0)
        q1 = tl.load(at + to_second, mask=mask, other=0.0)
        q2 = tl.load(at + to_third, mask=mask, other=0.0)
        q3 = tl.load(at + to_second + to_third, mask=mask, other=0.0)
    return q0, q1, q2, q3


@triton.jit
def in_units(q0, q1, q2, q3, DTYPE: tl.constexpr):
    """Queries as DTYPE, in units of a power of two near the largest: none overflows float16."""
    largest = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    exponent = tl.max(tl.max(largest, 1), 0).to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    unit = exponent.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    q0, q1 = (q0.to(tl.float32) * inverse).to(DTYPE), (q1.to(tl.float32) * inverse).to(DTYPE)
    q2, q3 = (q2.to(tl.float32) * inverse).to(DTYPE), (q3.to(tl.float32) * inverse).to(DTYPE)
    return q0, q1, q2, q3, unit


@triton.jit
def store_tile(
    base, a0, a1, a2, a3, factor, live, by_row, D: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Stores a tile whose rows begin at base + by_row, in the order of elements."""
    d = tl.arange(0, WIDE)
    f = factor[:, None]
    dtype = base.dtype.element_ty
    if KIND == 0:
        mask = live[:, None] & (d < D)[None, :]
        tl.store(base + by_row[:, None] + d[None, :], (a0 * f).to(dtype), mask=mask)
    else:
        mask = live[:, None] & (d < D // 4)[None, :]
        step: tl.constexpr = 2 if KIND == INT4 else 4
        to_second: tl.constexpr = D // 2 if KIND == INT4 else 1
        to_third: tl.constexpr = 1 if KIND == INT4 else 2
        at = base + by_row[:, None] + step * d[None, :]
        tl.store(at, (a0 * f).to(dtype), mask=mask)
        tl.store(at + to_second, (a1 * f).to(dtype), mask=mask)
        tl.store(at + to_third, (a2 * f).to(dtype), mask=mask)
        tl.store(at + to_second + to_third, (a3 * f).to(dtype), mask=mask)


@triton.jit
def seen_by(position, s, inside, live, row, first, tree, tree_row, window,
            ALONE: tl.constexpr, WINDOWED: tl.constexpr):  # fmt: skip
    """Which positions s each query sees: what came before it, or what the tree names.

    ALONE: a query at the very end, or queries that all come after every s.
    """
    if tree is not None:
        fresh = s - first
        asked = live[:, None] & inside[None, :] & (fresh[None, :] >= 0)
        named = tl.load(tree + row[:, None] * tree_row + fresh[None, :], mask=asked, other=0)
        seen = inside[None, :] & ((fresh[None, :] < 0) | (named != 0))
    elif ALONE:
        seen = live[:, None] & inside[None, :]
    else:
        seen = inside[None, :] & (s[None, :] <= position[:, None])
    if WINDOWED:
        seen = seen & (position[:, None] - s[None, :] < window)
    return seen


@triton.jit
def products_of(q0, q1, q2, q3, keys, KIND: tl.constexpr, DTYPE: tl.constexpr, OWN: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Queries times keys, (rows, positions)."""
    if KIND == 0:
        products = tl.dot(q0, tl.trans(keys), input_precision=PRECISION)
    else:
        k0, k1, k2, k3 = pieces_of(keys, KIND, DTYPE, OWN)
        products = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        products = tl.dot(q1, tl.trans(k1), products, input_precision=PRECISION)
        products = tl.dot(q2, tl.trans(k2), products, input_precision=PRECISION)
        products = tl.dot(q3, tl.trans(k3), products, input_precision=PRECISION)
    return products


@triton.jit
def columns_of(
    ks, vs, inside, scale, BLOCK_S: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    """What a column of products is multiplied by, and what is added to its exponents.

    A value's scale is a factor of its weight: added as a logarithm it costs nothing, and no weight
    leaves float16. The third is what takes it out of a weight again, for the sum of weights.
    """
    factor = tl.full([BLOCK_S], scale, tl.float32)
    column = tl.where(inside, 0.0, float("-inf"))
    unscaled = column
    if KIND > 0:
        factor *= ks.to(tl.float32)
        logarithm = log2_of(tl.maximum(vs.to(tl.float32), SMALLEST), OWN)
        column += logarithm
        unscaled = tl.exp2(-logarithm)
    return factor, column, unscaled


@triton.jit
def attended(
    q, k_pages, v_pages, k_scale, v_scale, table, tree, row, head, live, position, first, g,
    begin, end, window, scale, softcap, q_row, q_head, tree_row,
    k_page, k_head, k_place, v_page, v_head, v_place,
    ks_page, ks_head, ks_place, vs_page, vs_head, vs_place,
    P: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    ALONE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    TWINS: tl.constexpr,
):  # fmt: skip
    """A tile of queries over the positions begin … end of one head of one sequence.

    Answers each row's largest exponent (base 2), its sum of weights, and its weighted sum of
    values, in four pieces where pages hold codes. TWINS: keys and values lie at the same offsets.
    """
    q0, q1, q2, q3 = query_rows(q, row, head, live, q_row, q_head, D, WIDE, KIND)
    # Codes meet queries in float16, which has all of them and more digits than bfloat16.
    DTYPE: tl.constexpr = tl.float16 if KIND > 0 and PRECISION == "tf32" else q.dtype.element_ty
    if KIND > 0:
        q0, q1, q2, q3, unit = in_units(q0, q1, q2, q3, DTYPE)
        scale *= unit
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    a0 = tl.zeros([BLOCK_M, WIDE], tl.float32)
    a1, a2, a3 = a0, a0, a0
    d = tl.arange(0, WIDE)
    wide = (d < (D if KIND == 0 else D // 4))[None, :]
    places = tl.arange(0, BLOCK_S)
    s = begin + places
    # `begin` is where a page begins: in tiles of whole pages the same rows have the same places.
    place = (places if BLOCK_S % P == 0 else s) % P
    k_rows = k_pages + (g * k_head + place * k_place)[:, None] + d[None, :]
    v_rows = v_pages + (g * v_head + place * v_place)[:, None] + d[None, :]
    page = tl.load(table + s // P, mask=s < end, other=0).to(tl.int64)
    ks, vs = page, page
    if KIND > 0:
        k_scales = k_scale + g * ks_head + place * ks_place
        v_scales = v_scale + g * vs_head + place * vs_place
        ks = tl.load(k_scales + page * ks_page, mask=s < end, other=0)
        vs = tl.load(v_scales + page * vs_page, mask=s < end, other=0)
    for start in range(begin, end, BLOCK_S):
        s = start + places
        inside = s < end
        if BLOCK_S % P:
            place = s % P
            k_rows = k_pages + (g * k_head + place * k_place)[:, None] + d[None, :]
            v_rows = v_pages + (g * v_head + place * v_place)[:, None] + d[None, :]
        from_key = page * k_page
        from_value = from_key if TWINS else page * v_page
        keys = tl.load(k_rows + from_key[:, None], mask=inside[:, None] & wide, other=0)
        values = tl.load(v_rows + from_value[:, None], mask=inside[:, None] & wide, other=0)
        ahead = s + BLOCK_S
        page = tl.load(table + ahead // P, mask=ahead < end, other=0).to(tl.int64)
        if KIND > 0:
            # Two bytes are too few for a pipelined copy: the next tile's scales wait in registers.
            if BLOCK_S % P:
                k_scales = k_scale + g * ks_head + ahead % P * ks_place
                v_scales = v_scale + g * vs_head + ahead % P * vs_place
            next_ks = tl.load(k_scales + page * ks_page, mask=ahead < end, other=0)
            next_vs = tl.load(v_scales + page * vs_page, mask=ahead < end, other=0)
        products = products_of(q0, q1, q2, q3, keys, KIND, DTYPE, OWN, PRECISION)
        factor, column, unscaled = columns_of(ks, vs, inside, scale, BLOCK_S, KIND, OWN)
        if ALONE and not CAPPED and not WINDOWED and tree is None:
            # All rows see the same: scale and mask are one multiply-add an element.
            scores = products * (factor * LOG2_E)[None, :] + column[None, :]
        else:
            seen = seen_by(position, s, inside, live, row, first, tree, tree_row, window,
                           ALONE, WINDOWED)  # fmt: skip
            scores = scored(products * factor[None, :], 1.0, softcap, CAPPED) * LOG2_E
            scores = tl.where(seen, scores + column[None, :], float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key stays at −inf, and −inf − (−inf) is not a number.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - origin[:, None])
        correction = tl.exp2(peak - origin)
        # Summed over the columns at the end: lanes need not meet for it in every tile.
        if KIND == 0:
            totals = totals * correction[:, None] + weights
        else:
            totals = totals * correction[:, None] + weights * unscaled[None, :]
        peak = new_peak
        c = correction[:, None]
        if KIND == 0:
            rounded = weights.to(DTYPE)
            a0 = tl.dot(rounded, values, a0 * c, input_precision=PRECISION)
        else:
            rounded = weights.to(DTYPE)
            v0, v1, v2, v3 = pieces_of(values, KIND, DTYPE, OWN)
            a0 = tl.dot(rounded, v0, a0 * c, input_precision=PRECISION)
            a1 = tl.dot(rounded, v1, a1 * c, input_precision=PRECISION)
            a2 = tl.dot(rounded, v2, a2 * c, input_precision=PRECISION)
            a3 = tl.dot(rounded, v3, a3 * c, input_precision=PRECISION)
            ks, vs = next_ks, next_vs
    return peak, tl.sum(totals, 1), a0, a1, a2, a3


@triton.jit
def part_at(parts, stats, slot, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The largest scores, sums and weighted sums of a tile of rows, as one program stored them."""
    d = tl.arange(0, BLOCK_D)
    # Another multiprocessor wrote them: what this one has cached may be older.
    peak = tl.load(stats + slot * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + slot * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
    inside = mask[:, None] & (d < D)[None, :]
    at = parts + slot[:, None] * D + d[None, :]
    return peak, total, tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def merge_four(
    parts, stats, slot, step, left, live, peak, total, acc, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Adds up to four parts, `step` apart, `left` of them there: all loads, then all arithmetic."""
    m0, n0, x0 = part_at(parts, stats, slot, live, D, BLOCK_D)
    m1, n1, x1 = part_at(parts, stats, slot + step, live & (left > 1), D, BLOCK_D)
    m2, n2, x2 = part_at(parts, stats, slot + 2 * step, live & (left > 2), D, BLOCK_D)
    m3, n3, x3 = part_at(parts, stats, slot + 3 * step, live & (left > 3), D, BLOCK_D)
    new_peak = tl.maximum(peak, tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)))
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    c = tl.exp2(peak - origin)
    c0, c1 = tl.exp2(m0 - origin), tl.exp2(m1 - origin)
    c2, c3 = tl.exp2(m2 - origin), tl.exp2(m3 - origin)
    total = total * c + n0 * c0 + n1 * c1 + n2 * c2 + n3 * c3
    acc = acc * c[:, None] + x0 * c0[:, None] + x1 * c1[:, None]
    acc += x2 * c2[:, None] + x3 * c3[:, None]
    return new_peak, total, acc


@triton.jit
def merge(
    parts, stats, prefix_parts, prefix_stats, out, first, last, begin_q, top, count, g, R, H,
    queries, parts_of_prefix, out_row, out_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """All parts of a tile of `count` rows, programs first … last, and those of a shared prefix.

    The first program ended with these rows and stored them second (slot 2p + 1); the others began
    with them.
    """
    d = tl.arange(0, BLOCK_D)
    for begin in range(0, count, ROWS):
        r = begin + tl.arange(0, ROWS)
        live = r < count
        _, row, head, _ = rows_from(top + begin, begin_q, 0, g, R, ROWS, ALONE)
        slot = (2 * first + 1) * BLOCK_M + r.to(tl.int64)
        peak, total, acc = part_at(parts, stats, slot, live, D, BLOCK_D)
        for p in range(first + 1, last + 1, 4):
            slot = 2 * p * BLOCK_M + r.to(tl.int64)
            peak, total, acc = merge_four(
                parts, stats, slot, 2 * BLOCK_M, last + 1 - p, live, peak, total, acc, D, BLOCK_D
            )
        if prefix_parts is not None:
            for p in range(0, parts_of_prefix, 4):
                slot = (p * queries + row) * H + head
                peak, total, acc = merge_four(
                    prefix_parts, prefix_stats, slot, queries * H, parts_of_prefix - p, live,
                    peak, total, acc, D, BLOCK_D,
                )  # fmt: skip
        answer = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
        inside = live[:, None] & (d < D)[None, :]
        tl.store(target, answer.to(out.dtype.element_ty), mask=inside)


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
            arrived = tl.atomic_add(counters + first_program, 1, sem="acq_rel")
            if arrived == last_program - first_program:
                merge(
                    parts, stats, prefix_parts, prefix_stats, out, first_program, last_program,
                    begin_q, top, tl.minimum(new * R - top, BLOCK_M), g, R, G * R, queries,
                    parts_of_prefix, out_row, out_head, D, BLOCK_D, BLOCK_M, ROWS, ALONE,
                )  # fmt: skip
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


KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}


class Tiles(NamedTuple):
    """How a launch is cut: rows of queries, positions, warps, stages of the pipeline of loads."""

    rows: int
    positions: int
    warps: int = 4
    stages: int = 3
    #: Programs that fit on a multiprocessor.
    programs: int = 2
    #: The most registers a thread may have; None leaves it to the compiler.
    registers: int | None = None


def tiles_for(rows: int, D: int, dtype: torch.dtype, kind: int) -> Tiles:
    """For so many rows of queries (query heads of a group times queries) a sequence.

    Every answer is compiled and checked in the tests.
    """
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        return Tiles(block_m, 32, stages=2)
    if D > 128:
        return Tiles(block_m, 32 if kind == 0 else 64)
    if block_m > 16 or kind == 0:
        return Tiles(block_m, 64)
    # Codes are soon read: it takes more programs to keep a multiprocessor busy with them.
    if kind == KINDS[torch.uint8]:
        return Tiles(block_m, 128, programs=4, registers=128)
    return Tiles(block_m, 64, programs=4, registers=128)


def in_words(pages: Tensor, kind: int) -> Tensor:
    """Pages of codes as words of four; others as they are."""
    if not kind:
        return pages
    word = torch.int16 if kind == 3 else torch.int32
    return pages.view(torch.uint8).view(word)


def _attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor | None,
    max_q: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
    prefix_rows: int,
    prefix_pages: Tensor | None,
    out: Tensor,
) -> None:
    require(q, k_pages, v_pages)
    (queries, H, D), (_, G, P, _) = q.shape, k_pages.shape
    if not queries:
        return
    B, R = len(seq_lens), H // G
    kind = KINDS.get(k_pages.dtype, 0)
    tiles = tiles_for(R * max_q, D, q.dtype, kind)
    k_words, v_words = in_words(k_pages, kind), in_words(v_pages, kind)
    fixed = {
        "P": P,
        "D": D,
        "WIDE": max(16, triton.next_power_of_2(D if kind == 0 else D // 4)),
        "KIND": kind,
        "OWN": q.is_cuda,
        "CAPPED": softcap > 0.0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "TWINS": k_pages.stride() == v_pages.stride(),
    }
    strides = (*k_words.stride()[:3], *v_words.stride()[:3])
    strides += (*strides_of(k_scale), *strides_of(v_scale))
    prefix_parts = prefix_stats = None
    parts_of_prefix = 0
    if prefix_pages is not None and not window:
        wide = tiles_for(R * max_q * prefix_rows, D, q.dtype, kind)
        grid = len(prefix_pages) * G, triton.cdiv(R * max_q * prefix_rows, wide.rows)
        parts_of_prefix = parts_for(grid[0] * grid[1], processors(q) * wide.programs)
        shape = (parts_of_prefix, queries, H)
        prefix_parts = q.new_empty((*shape, D), dtype=torch.float32)
        prefix_stats = q.new_empty((*shape, 2), dtype=torch.float32)
        prefix_kernel[(*grid, parts_of_prefix)](
            *(q, k_words, v_words, k_scale, v_scale, block_table, cu_q, prefix_pages),
            *(prefix_parts, prefix_stats, G, R, max_q, scale, softcap, prefix_rows),
            *(parts_of_prefix, queries, q.stride(0), q.stride(1), block_table.stride(0), *strides),
            BLOCK_M=wide.rows,
            BLOCK_S=wide.positions,
            num_warps=wide.warps,
            num_stages=wide.stages,
            maxnreg=wide.registers,
            **fixed,
        )
    most = processors(q) * tiles.programs
    tops = triton.cdiv(R * max_q, tiles.rows)
    units = B * G * tops * (triton.cdiv(block_table.shape[1] * P, tiles.positions) + 1)
    parts = q.new_empty((2 * most, tiles.rows, D), dtype=torch.float32)
    stats = q.new_empty((2 * most, tiles.rows, 2), dtype=torch.float32)
    attention_kernel[(most,)](
        *(q, k_words, v_words, k_scale, v_scale, block_table, seq_lens, cu_q, tree_mask),
        *(None if prefix_parts is None else prefix_pages, out),
        *(parts, stats, prefix_parts, prefix_stats, arrivals(most, q)),
        *(B, G, R, max_q, window, scale, softcap, prefix_rows, parts_of_prefix, queries),
        *(q.stride(0), q.stride(1), block_table.stride(0)),
        0 if tree_mask is None else tree_mask.stride(0),
        *(*strides, *out.stride()[:2]),
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_M=tiles.rows,
        BLOCK_S=tiles.positions,
        BLOCK_B=max(32, triton.next_power_of_2(B)),
        ROWS=min(tiles.rows, triton.next_power_of_2(R * max_q), 1024 // triton.next_power_of_2(D)),
        ALONE=max_q == 1,
        WINDOWED=window > 0,
        ONE_TOP=tops == 1,
        NARROW=units * most < 2**31,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **fixed,
    )


def parts_for(programs: int, room: int) -> int:
    """Into how many parts a shared prefix is cut, so that so many programs fill the room."""
    return max(1, min(room // max(programs, 1), 32))


def require(q: Tensor, *pages: Tensor) -> None:
    """What the kernels take."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {q.dtype}")
    if not 1 <= q.shape[-1] <= WIDEST:
        raise RangeError(f"the kernels take heads up to {WIDEST} wide, not {q.shape[-1]}")
    if any(x.stride(-1) != 1 for x in (q, *pages)):
        raise RangeError("the kernels need the elements of a head beside each other")
    for x in pages:
        size = {torch.uint8: 2}.get(x.dtype, 4)
        if x.dtype in KINDS and any(n % size for n in (x.shape[-1], *x.stride()[:-1])):
            raise RangeError(
                f"the kernels read codes four at a time: rows of {q.shape[-1]} elements and their "
                f"strides {x.stride()} must be multiples of {size} bytes"
            )


def _append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> None:
    for rows, pages in ((k, k_pages), (v, v_pages)):
        require(rows)
        if pages.stride(-1) != 1:
            raise RangeError("the kernels need the elements of a head beside each other")
    append(k, v, k_pages, v_pages, slots, k_scale, v_scale, cosine, sine)


_LIBRARY: Any = fast_paged.define(KERNELS)
_LIBRARY.impl("attention", _attention, "CUDA")
_LIBRARY.impl("append", _append, "CUDA")
