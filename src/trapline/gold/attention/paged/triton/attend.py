# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A tile of queries over a run of keys on pages, and merging parts of the same rows.

A program computes all query heads of a key/value head: row r = query · R + head. The page numbers
of a tile are loaded one tile ahead, so that its addresses are known when the pipeline of loads
reaches it. Codes are never multiplied by their scale one by one: the key's scale multiplies its
column of products, the value's is added to its column of exponents. Positions beyond a sequence's
length are not loaded. Offsets are 64-bit.

All queries see everything before the first of them, so most tiles need no mask. In the last tiles a
query sees what came before it, or the new positions that a tree mask names. Each row of queries has
the 64 positions of a tree mask's tile as the bits of a word.
"""

import triton
import triton.language as tl

from trapline.gold.attention.dense.triton.tiles import scored
from trapline.gold.attention.paged.triton.pages import INT4, log2_of, pieces_of
from trapline.gold.device import LOG2_E

#: The smallest float16. A scale of 0 counts as this, so that its logarithm is finite.
SMALLEST = tl.constexpr(2.0**-24)


@triton.jit
def for_each_row(number, live):
    """The number once per row: the interpreter of Triton 3.9 rejects masks made from scalars."""
    return tl.full(live.shape, number, tl.int32)


# --- which positions a query sees ---------------------------------------------------------------


@triton.jit
def eight_of(tree, word, asked):
    """Eight bytes of a row, each 0 or 1, as eight bits."""
    found = tl.load(tree + word, mask=asked, other=0)
    return (((found & 0x0101010101010101) * 0x0102040810204080) >> 56 & 255).to(tl.uint64)


@triton.jit
def named_by(tree, at_row, live, fresh, count):
    """Bit j of a row's word: whether its query sees the new position fresh + j, of `count`.

    A word is one number per row: bytes would spread over the lanes as they were loaded, and the
    scores with them. Bits beyond the count are undefined.
    """
    begin, count = tl.maximum(fresh, 0) // 8, for_each_row(count, live)
    more = eight_of(tree, at_row + begin + 8, live & (8 * begin + 64 < count))
    word = eight_of(tree, at_row + begin, live & (8 * begin < count))
    for i in tl.static_range(1, 8):
        asked = live & (8 * (begin + i) < count)
        word |= eight_of(tree, at_row + begin + i, asked) << 8 * i
    down = (tl.maximum(fresh, 0) % 8).to(tl.uint64)
    # In two shifts, because a shift by 64 is undefined.
    word = (word >> down) | (more << 1 << (63 - down))
    return word << tl.minimum(tl.maximum(-fresh, 0), 63).to(tl.uint64)


@triton.jit
def words_of(tree, row, tree_row, live, fresh, count, BLOCK_S: tl.constexpr):
    """The two words of each row for a tile whose first position is the new position `fresh`."""
    word, later = row, row
    if tree is not None:
        word = named_by(tree, row * tree_row, live, fresh, count)
        later = word
        if BLOCK_S > 64:
            later = named_by(tree, row * tree_row, live, fresh + 64, count)
    return word, later


@triton.jit
def first_hidden(
    begin, end, first, tree, ALONE: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Start of the tiles that some query may not see entirely; queries start at `first`."""
    middle = end
    if WINDOWED:
        middle = begin
    elif tree is not None or not ALONE:
        middle = tl.minimum(begin + tl.maximum(first - begin, 0) // BLOCK_S * BLOCK_S, end)
    return middle


@triton.jit
def seen_by(
    position, s, first, word, later, window, tree, BLOCK_S: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Which positions s each query sees: those before it, or those that the tree's words name.

    Positions beyond the end of the sequence are undefined.
    """
    if tree is not None:
        j = tl.arange(0, BLOCK_S)
        named = word[:, None]
        if BLOCK_S > 64:
            named = tl.where((j < 64)[None, :], named, later[:, None])
        named = named >> (j % 64).to(tl.uint64)[None, :]
        seen = (s < first)[None, :] | (named & 1 != 0)
    else:
        seen = s[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (position[:, None] - s[None, :] < window)
    return seen


# --- a tile of queries --------------------------------------------------------------------------


@triton.jit
def rows_from(top, begin_q, new, g, R, BLOCK_M: tl.constexpr, ALONE: tl.constexpr):
    """Of a tile of rows: queries within the sequence and overall, heads, and which rows exist."""
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
    """A tile of queries; if pages hold codes, its four pieces in the order of the words."""
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
    """Queries as DTYPE, in units of a power of two near the largest, so that none overflows."""
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
    """Store a tile whose rows begin at base + by_row, in the order of elements."""
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
    """The factor of a column of products, the addend of its exponents, the inverse of its scale.

    A value's scale is a factor of its weight: added as a logarithm it costs nothing, and no weight
    leaves float16. The inverse removes it from the weights for their sum.
    """
    factor = tl.full([BLOCK_S], scale, tl.float32)
    column = tl.where(inside, 0.0, float("-inf"))
    unscaled = column
    if KIND > 0:
        factor *= ks.to(tl.float32)
        # A value that could not be encoded has a scale of NaN, which must not become a small one.
        known = tl.maximum(vs.to(tl.float32), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
        logarithm = log2_of(known, OWN)
        column += logarithm
        unscaled = tl.exp2(-logarithm)
    return factor, column, unscaled


@triton.jit
def scales_at(
    k_scale, v_scale, g, page, place, inside, ks_page, ks_head, ks_place,
    vs_page, vs_head, vs_place, KIND: tl.constexpr,
):  # fmt: skip
    """The scales of keys and values; placeholders if pages hold no codes."""
    ks, vs = page, page
    if KIND > 0:
        at = g * ks_head + place * ks_place + page * ks_page
        ks = tl.load(k_scale + at, mask=inside, other=0)
        at = g * vs_head + place * vs_place + page * vs_page
        vs = tl.load(v_scale + at, mask=inside, other=0)
    return ks, vs


@triton.jit
def scores_of(products, factor, column, softcap, CAPPED: tl.constexpr):
    """Exponents, base 2."""
    if CAPPED:
        capped = scored(products * factor[None, :], 1.0, softcap, CAPPED)
        scores = capped * LOG2_E + column[None, :]
    else:
        # Scale and mask are one multiply-add per element.
        scores = products * (factor * LOG2_E)[None, :] + column[None, :]
    return scores


@triton.jit
def counted(weights, unscaled, KIND: tl.constexpr, BY_LANE: tl.constexpr):
    """The weights' contribution to their sums: by column, or summed."""
    if KIND > 0:
        weights = weights * unscaled[None, :]
    if not BY_LANE:
        weights = tl.sum(weights, 1)[:, None]
    return weights


@triton.jit
def applied(weights, values, a0, a1, a2, a3, c, KIND: tl.constexpr, DTYPE: tl.constexpr,
            OWN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Earlier sums times c, plus weights times values."""
    rounded = weights.to(DTYPE)
    if KIND == 0:
        a0 = tl.dot(rounded, values, a0 * c, input_precision=PRECISION)
    else:
        v0, v1, v2, v3 = pieces_of(values, KIND, DTYPE, OWN)
        a0 = tl.dot(rounded, v0, a0 * c, input_precision=PRECISION)
        a1 = tl.dot(rounded, v1, a1 * c, input_precision=PRECISION)
        a2 = tl.dot(rounded, v2, a2 * c, input_precision=PRECISION)
        a3 = tl.dot(rounded, v3, a3 * c, input_precision=PRECISION)
    return a0, a1, a2, a3


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

    Returns each row's largest exponent (base 2), its sum of weights, and its weighted sum of
    values, in four pieces if pages hold codes. TWINS: keys and values have the same offsets.
    """
    q0, q1, q2, q3 = query_rows(q, row, head, live, q_row, q_head, D, WIDE, KIND)
    # Codes are multiplied in float16, which represents all of them and is finer than bfloat16.
    DTYPE: tl.constexpr = tl.float16 if KIND > 0 and PRECISION == "tf32" else q.dtype.element_ty
    if KIND > 0:
        q0, q1, q2, q3, unit = in_units(q0, q1, q2, q3, DTYPE)
        scale *= unit
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Columns are summed at the end, which saves an exchange between lanes per tile; with many rows
    # it would take too many registers.
    BY_LANE: tl.constexpr = BLOCK_M <= 32
    totals = tl.zeros([BLOCK_M, BLOCK_S if BY_LANE else 1], tl.float32)
    a0 = tl.zeros([BLOCK_M, WIDE], tl.float32)
    a1, a2, a3 = a0, a0, a0
    d = tl.arange(0, WIDE)
    wide = (d < (D if KIND == 0 else D // 4))[None, :]
    places = tl.arange(0, BLOCK_S)
    s = begin + places
    # `begin` is the start of a page: in tiles of whole pages a row's place is constant.
    place = (places if BLOCK_S % P == 0 else s) % P
    k_rows = k_pages + (g * k_head + place * k_place)[:, None] + d[None, :]
    v_rows = v_pages + (g * v_head + place * v_place)[:, None] + d[None, :]
    page = tl.load(table + s // P, mask=s < end, other=0).to(tl.int64)
    strides = ks_page, ks_head, ks_place, vs_page, vs_head, vs_place
    ks, vs = scales_at(k_scale, v_scale, g, page, place, s < end, *strides, KIND)
    middle = first_hidden(begin, end, first, tree, ALONE, WINDOWED, BLOCK_S)
    word, later = words_of(tree, row, tree_row, live, middle - first, end - first, BLOCK_S)
    # The loop twice: most tiles in the first, those that need a mask in the second.
    ALL_SEEN: tl.constexpr = ALONE and not WINDOWED and tree is None
    for MASKED in tl.static_range(1 if WINDOWED else 0, 1 if ALL_SEEN else 2):
        for start in range(middle if MASKED else begin, end if MASKED else middle, BLOCK_S):
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
            # Two bytes are too few for a pipelined copy: the next scales are kept in registers.
            next_place = place if BLOCK_S % P == 0 else ahead % P
            next_ks, next_vs = scales_at(
                k_scale, v_scale, g, page, next_place, ahead < end, *strides, KIND
            )
            products = products_of(q0, q1, q2, q3, keys, KIND, DTYPE, OWN, PRECISION)
            factor, column, unscaled = columns_of(ks, vs, inside, scale, BLOCK_S, KIND, OWN)
            scores = scores_of(products, factor, column, softcap, CAPPED)
            if MASKED:
                seen = seen_by(position, s, first, word, later, window, tree, BLOCK_S, WINDOWED)
                scores = tl.where(seen, scores, float("-inf"))
                # Loaded a tile ahead, as pages and scales, outside the pipeline.
                word, later = words_of(
                    tree, row, tree_row, live, start + BLOCK_S - first, end - first, BLOCK_S
                )
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen no key stays at −inf, and −inf − (−inf) is NaN.
            origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - origin[:, None])
            c = tl.exp2(peak - origin)[:, None]
            totals = totals * c + counted(weights, unscaled, KIND, BY_LANE)
            peak = new_peak
            a0, a1, a2, a3 = applied(
                weights, values, a0, a1, a2, a3, c, KIND, DTYPE, OWN, PRECISION
            )
            ks, vs = next_ks, next_vs
    return peak, tl.sum(totals, 1), a0, a1, a2, a3


# --- merging the parts of several programs ------------------------------------------------------


@triton.jit
def part_at(parts, stats, slot, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The largest scores, sums and weighted sums of a tile of rows, as one program stored them."""
    d = tl.arange(0, BLOCK_D)
    # Another multiprocessor wrote them: this one's cache may be stale.
    peak = tl.load(stats + slot * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + slot * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
    inside = mask[:, None] & (d < D)[None, :]
    at = parts + slot[:, None] * D + d[None, :]
    return peak, total, tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def merge_four(
    parts, stats, slot, step, left, live, peak, total, acc, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Add up to four parts, `step` apart, of `left` that exist: all loads, then all arithmetic."""
    left = for_each_row(left, live)
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
    """Merge all parts of `count` rows: those of programs first … last and of a shared prefix.

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
