# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A tile of queries over a run of keys on pages: the inner loop of the paged kernels.

A program serves all query heads of a key/value head: row r = query · R + head. The page numbers of
a tile are loaded one tile ahead, so that the tile's addresses are known when its turn comes in the
pipeline of loads. Codes (`kernels_paged_codes`) are never multiplied by their scale one by one: the
key's scale goes to its column of products, the value's to its column of exponents. Nothing beyond a
sequence's length is loaded, so whatever lies there cannot leak. Offsets are 64-bit.
"""

import triton
import triton.language as tl

from trapline.gold.attention.dense.triton import scored
from trapline.gold.attention.paged.triton.codes import INT4, log2_of, pieces_of
from trapline.gold.attention.paged.triton.mask import first_hidden, seen_by, words_of
from trapline.gold.device import LOG2_E

#: The smallest float16. A scale of 0 counts as this, so that its logarithm is finite.
SMALLEST = tl.constexpr(2.0**-24)


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
        # A value that is lost has a scale of NaN, which must not pass for a small one.
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
    """The scales of keys and values; something else where pages hold no codes."""
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
        # Scale and what lies beyond the end are one multiply-add an element.
        scores = products * (factor * LOG2_E)[None, :] + column[None, :]
    return scores


@triton.jit
def counted(weights, unscaled, KIND: tl.constexpr, BY_LANE: tl.constexpr):
    """What weights add to the sums of weights: themselves by column, or summed."""
    if KIND > 0:
        weights = weights * unscaled[None, :]
    if not BY_LANE:
        weights = tl.sum(weights, 1)[:, None]
    return weights


@triton.jit
def applied(weights, values, a0, a1, a2, a3, c, KIND: tl.constexpr, DTYPE: tl.constexpr,
            OWN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What was summed before, times c, and weights times values."""
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
    # Summed over the columns at the end, lanes need not meet for it in every tile; of many rows
    # that would take too many registers.
    BY_LANE: tl.constexpr = BLOCK_M <= 32
    totals = tl.zeros([BLOCK_M, BLOCK_S if BY_LANE else 1], tl.float32)
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
    strides = ks_page, ks_head, ks_place, vs_page, vs_head, vs_place
    ks, vs = scales_at(k_scale, v_scale, g, page, place, s < end, *strides, KIND)
    middle = first_hidden(begin, end, first, tree, ALONE, WINDOWED, BLOCK_S)
    word, later = words_of(tree, row, tree_row, live, middle - first, end - first, BLOCK_S)
    # Twice the same loop: most tiles in the first, those that hide something in the second.
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
            # Two bytes are too few for a pipelined copy: the next scales wait in registers.
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
                # As pages and scales: loaded a tile ahead, they need no place in the pipeline.
                word, later = words_of(
                    tree, row, tree_row, live, start + BLOCK_S - first, end - first, BLOCK_S
                )
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen no key stays at −inf, and −inf − (−inf) is not a number.
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
