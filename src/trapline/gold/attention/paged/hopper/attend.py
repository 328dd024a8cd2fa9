# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The heads of one query over a run of keys, by one warp, in Gluon: integer codes and floats.

The recurrence and the treatment of scales are those of `triton.attend`. A tensor-core tile has 16
rows and 8 columns.

*Integer codes: heads are rows.* Of a tile's 16 rows, 8 are high bytes and 8 low bytes. Sums have up
to four pieces, whose elements are apart as the codes are.

*16-bit and float8 pages: heads are columns.* With keys as the rows, no part of a tile is padding
when a key/value head has 8 query heads, and scores and sums take half the registers and
instructions. Scores come out with one position per row; transposed within the warp they are weights
that meet the values, whose elements are the rows. float8 is decoded to float16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trapline.gold.attention.paged.hopper.pages import (
    LARGEST,
    MMA,
    as_tiles,
    clear_beyond,
    factors_of,
    fetch,
    first_tiles,
    keys_in_floats,
    nibbles,
    numbers_of,
    one_number,
    origin_of,
    page_at,
    power_of_two,
    scales_at,
    together,
    two_bytes,
    values_in_bytes,
    values_in_floats,
    weights_in_bytes,
)
from trapline.gold.attention.paged.triton.pages import FP8, INT4, INT8
from trapline.gold.device import LOG2_E

# --- integer codes: heads are rows --------------------------------------------------------------

A_8 = gl.constexpr(gl.DotOperandLayout(0, MMA, 4))
B_8 = gl.constexpr(gl.DotOperandLayout(1, MMA, 4))
B_16 = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def nothing(N: gl.constexpr):
    """Zero sums, (8, N), in the layout of the tensor cores."""
    return one_number(gl.zeros([16, N], gl.int32, MMA))


@gluon.jit
def query_piece_rows(q, R, q_head, N: gl.constexpr, FROM: gl.constexpr):
    """(8, N): elements of every head from FROM on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    at = q + gl.expand_dims(r * q_head, 1) + gl.expand_dims(d + FROM, 0)
    return gl.load(at, mask=gl.expand_dims(r < R, 1), other=0.0)


@gluon.jit
def queries_of(q, R, q_head, D: gl.constexpr, KIND: gl.constexpr):
    """The two pieces of the queries that meet those of keys, and each row's unit."""
    FIRST: gl.constexpr = D // 2 if KIND == INT4 else D
    x0 = query_piece_rows(q, R, q_head, FIRST, 0)
    x1 = x0
    if FIRST < D:
        x1 = query_piece_rows(q, R, q_head, FIRST, D // 2)
    largest = gl.max(gl.maximum(gl.abs(x0), gl.abs(x1)).to(gl.float32), 1)
    largest = gl.maximum(largest, 1e-30)
    # Integers cannot be NaN, so the unit of the row is.
    unit = largest / LARGEST + gl.sum(x0.to(gl.float32) * 0.0 + x1.to(gl.float32) * 0.0, 1)
    inverse = gl.expand_dims(LARGEST / largest, 1)
    q0 = gl.convert_layout(two_bytes(x0.to(gl.float32) * inverse), A_8)
    q1 = gl.convert_layout(two_bytes(x1.to(gl.float32) * inverse), A_8)
    if KIND == INT4:
        unit /= 16.0
    return q0, q1, unit


@gluon.jit
def products_of_rows(q0, q1, keys, slot, S: gl.constexpr, KIND: gl.constexpr):
    """Queries times the keys of a tile, (8, S)."""
    codes = keys.index(slot).permute([1, 0]).load(B_8)
    sums = gl.zeros([16, S], gl.int32, MMA)
    if KIND == INT8:
        sums = mma_v2(q0, codes, sums)
    else:
        k0, k1 = nibbles(codes)
        sums = mma_v2(q1, k1, mma_v2(q0, k0, sums))
    return one_number(sums)


@gluon.jit
def applied_rows(weights, values, slot, sums, shrink, grow, KIND: gl.constexpr):
    """Earlier sums times `shrink`, plus weights times the values of a tile times `grow`."""
    a0, a1, a2, a3 = sums
    N: gl.constexpr = a0.shape[1]
    by_row: gl.constexpr = gl.SliceLayout(1, a0.type.layout)
    c = gl.expand_dims(gl.convert_layout(shrink, by_row, assert_trivial=True), 1)
    f = gl.expand_dims(gl.convert_layout(grow, by_row, assert_trivial=True), 1)
    w = weights_in_bytes(weights)
    v0, v1 = values_in_bytes(values.index(slot).load(B_16))
    none = gl.zeros([16, N], gl.int32, MMA)
    if KIND == INT8:
        a0 = a0 * c + f * one_number(mma_v2(w, v0, none))
        a1 = a1 * c + f * one_number(mma_v2(w, v1, none))
    else:
        low, high = nibbles(v0)
        a0 = a0 * c + f * one_number(mma_v2(w, low, none))
        a1 = a1 * c + f * one_number(mma_v2(w, high, none))
        low, high = nibbles(v1)
        a2 = a2 * c + f * one_number(mma_v2(w, low, none))
        a3 = a3 * c + f * one_number(mma_v2(w, high, none))
    return a0, a1, a2, a3


@gluon.jit
def weigh(exponents, peak):
    """Weights, the new peak, the factor of earlier sums, and the factor of this tile's sums.

    16-bit weights are relative to the largest of their own tile: one weight far above the others
    must not round them to zero.
    """
    highest = gl.max(exponents, 1)
    new_peak = gl.maximum(peak, highest)
    origin = origin_of(new_peak)
    shrink = power_of_two(peak - origin)
    grow = power_of_two(highest - origin)
    weights = power_of_two(exponents - gl.expand_dims(origin_of(highest), 1))
    return weights, new_peak, shrink, grow


@gluon.jit
def lane_sums_rows(weights):
    """(8, 8): sums within a lane; lanes are summed once, at the end."""
    S: gl.constexpr = weights.shape[1]
    return gl.sum(gl.reshape(weights, [8, S // 8, 8]), 1)


@gluon.jit
def across_lanes(by_row, totals):
    layout: gl.constexpr = gl.SliceLayout(1, totals.type.layout)
    return gl.expand_dims(gl.convert_layout(by_row, layout, assert_trivial=True), 1)


@gluon.jit
def attended_in_rows(
    q, table, pages, ring, scales, g, R, begin, end, done, scale, q_head,
    P: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The R heads from q on over the positions begin … end; `done` tiles went through the ring.

    Returns each row's largest exponent (base 2), its sum of weights, and its weighted sum of
    values in four pieces.
    """
    boxes_of_keys, boxes_of_values, gates = ring
    STAGES: gl.constexpr = gates.shape[0]
    BOX: gl.constexpr = pages[0].block_type.shape[2]
    C: gl.constexpr = pages[0].block_type.shape[3]
    last = end - 1
    count = gl.cdiv(end - begin, S)
    first_tiles(table, pages, ring, g, begin, count, last, done, P, S, 1)
    keys = as_tiles(boxes_of_keys, gl.int8, S, C)
    values = as_tiles(boxes_of_values, gl.int16, S, C // 2)
    q0, q1, unit = queries_of(q, R, q_head, D, KIND)

    scores = nothing(S)
    totals = lane_sums_rows(scores)
    a = nothing(C // 2)
    sums = a, a, a, a
    layout: gl.constexpr = scores.type.layout
    across: gl.constexpr = gl.SliceLayout(0, layout)
    unit = gl.convert_layout(unit, gl.SliceLayout(1, layout)) * (scale * LOG2_E)
    peak = gl.full_like(unit, float("-inf"))
    # One lane per position loads scales a tile ahead, and their page numbers two tiles ahead.
    places = gl.arange(0, S, layout=gl.BlockedLayout([S // 32], [32], [1], [0]))
    page = page_at(table, begin + places, end, P)
    ks, vs = scales_at(scales, page, begin + places, end, P)
    page = page_at(table, begin + S + places, end, P)
    for t in range(count):
        start = begin + t * S
        slot = (done + t) % STAGES
        later = start + STAGES * S
        numbers = numbers_of(table, later, last, P, BOX, S)
        ahead = start + S + places
        next_ks, next_vs = scales_at(scales, page, ahead, end, P)
        page = page_at(table, ahead + S, end, P)
        factor, added, unscaled = factors_of(ks, vs, start + places < end, across)
        mbarrier.wait(gates.index(slot), (done + t) // STAGES & 1)
        products = products_of_rows(q0, q1, keys, slot, S, KIND)
        exponents = products * gl.expand_dims(unit, 1)
        exponents = exponents * gl.expand_dims(factor, 0) + gl.expand_dims(added, 0)
        weights, peak, shrink, grow = weigh(exponents, peak)
        counted = weights * gl.expand_dims(unscaled, 0)
        ks, vs = next_ks, next_vs
        totals *= across_lanes(shrink, totals)
        totals += lane_sums_rows(counted) * across_lanes(grow, totals)
        sums = applied_rows(weights, values, slot, sums, shrink, grow, KIND)
        together()
        fetch(pages, ring, slot, numbers, g, later, last, later < end, P, S, 1)
    total = gl.convert_layout(gl.sum(totals, 1), gl.SliceLayout(1, layout), assert_trivial=True)
    return peak, total, sums, done + count


# --- floats: heads are columns ------------------------------------------------------------------

#: The columns of a tile: there may be fewer heads.
HEADS = gl.constexpr(8)
A = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def query_piece_columns(q, R, q_head, N: gl.constexpr, FROM: gl.constexpr, KIND: gl.constexpr):
    """(N, HEADS): elements from FROM on of every head; for float8, every other pair of elements."""
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 1], [0, 1])
    d = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    r = gl.arange(0, HEADS, layout=gl.SliceLayout(0, layout))
    if KIND == FP8:
        d = d // 2 * 4 + d % 2
    at = q + gl.expand_dims(r * q_head, 0) + gl.expand_dims(d + FROM, 1)
    return gl.load(at, mask=gl.expand_dims(r < R, 0), other=0.0)


@gluon.jit
def query_columns(q, R, q_head, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr):
    """The two pieces of the queries that meet those of keys, and each head's unit."""
    FIRST: gl.constexpr = D // 2 if (KIND == FP8) or HALVES == 2 else D
    SECOND: gl.constexpr = 2 if KIND == FP8 else D // 2
    x0 = query_piece_columns(q, R, q_head, FIRST, 0, KIND)
    x1 = x0
    if FIRST < D:
        x1 = query_piece_columns(q, R, q_head, FIRST, SECOND, KIND)
    if KIND == 0:
        unit = gl.full([HEADS], 1.0, gl.float32, gl.SliceLayout(0, MMA))
        q0 = gl.convert_layout(x0, B)
        q1 = gl.convert_layout(x1, B)
    else:
        largest = gl.max(gl.maximum(gl.abs(x0), gl.abs(x1)).to(gl.float32), 0)
        # The power of two below the largest: nothing is rounded, nothing overflows float16.
        exponent = gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 1 << 23)
        unit = exponent.to(gl.float32, bitcast=True)
        inverse = gl.expand_dims((0x7F000000 - exponent).to(gl.float32, bitcast=True), 0)
        q0 = gl.convert_layout((x0.to(gl.float32) * inverse).to(gl.float16), B)
        q1 = gl.convert_layout((x1.to(gl.float32) * inverse).to(gl.float16), B)
    return q0, q1, unit


@gluon.jit
def products_of_columns(q0, q1, keys, slot, none, KIND: gl.constexpr, HALVES: gl.constexpr):
    """The keys of a tile times queries, (S, HEADS)."""
    if KIND == FP8:
        k0, k1 = keys_in_floats(keys.index(slot).load(A))
        products = mma_v2(k1, q1, mma_v2(k0, q0, none))
    else:
        products = mma_v2(keys.index(slot * HALVES).load(A), q0, none)
        if HALVES == 2:
            products = mma_v2(keys.index(slot * HALVES + 1).load(A), q1, products)
    return products


@gluon.jit
def applied_columns(w, values, slot, a0, a1, shrink, KIND: gl.constexpr, HALVES: gl.constexpr):
    """Earlier sums times `shrink`, plus the values of a tile times weights."""
    c = gl.expand_dims(shrink, 0)
    if KIND == FP8:
        v0, v1 = values_in_floats(values.index(slot).permute([1, 0]).load(A))
        a0 = mma_v2(v0, w, a0 * c)
        a1 = mma_v2(v1, w, a1 * c)
    else:
        a0 = mma_v2(values.index(slot * HALVES).permute([1, 0]).load(A), w, a0 * c)
        if HALVES == 2:
            a1 = mma_v2(values.index(slot * HALVES + 1).permute([1, 0]).load(A), w, a1 * c)
    return a0, a1


@gluon.jit
def weights_as_columns(weights):
    """(S, HEADS) weights in the layout of products, as the second operand."""
    S: gl.constexpr = weights.shape[0]
    turned = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [weights],
        dtype=weights.dtype,
        is_pure=True,
        pack=2,
    )
    x = gl.permute(gl.reshape(turned, [S // 8, HEADS, 8]), [0, 2, 1])
    return gl.convert_layout(gl.reshape(x, [S, HEADS]), B, assert_trivial=True)


@gluon.jit
def lane_sums_columns(weights):
    """(8, HEADS): sums within a lane; lanes are summed once, at the end."""
    S: gl.constexpr = weights.shape[0]
    return gl.sum(gl.reshape(weights, [S // 8, 8, HEADS]), 0)


@gluon.jit
def down_lanes(by_column, totals):
    layout: gl.constexpr = gl.SliceLayout(0, totals.type.layout)
    return gl.expand_dims(gl.convert_layout(by_column, layout, assert_trivial=True), 0)


@gluon.jit
def attended_in_columns(
    q, table, pages, ring, scales, g, R, begin, end, done, scale, q_head,
    P: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """As `attended_in_rows`, for floats."""
    boxes_of_keys, boxes_of_values, gates = ring
    STAGES: gl.constexpr = gates.shape[0]
    BOX: gl.constexpr = pages[0].block_type.shape[2]
    C: gl.constexpr = pages[0].block_type.shape[3]
    WORDS: gl.constexpr = pages[0].dtype if KIND == 0 else gl.int16
    PER_WORD: gl.constexpr = 1 if KIND == 0 else 2
    DTYPE: gl.constexpr = pages[0].dtype if KIND == 0 else gl.float16
    last = end - 1
    count = gl.cdiv(end - begin, S)
    first_tiles(table, pages, ring, g, begin, count, last, done, P, S, HALVES)
    keys = as_tiles(boxes_of_keys, WORDS, S, C // PER_WORD)
    values = as_tiles(boxes_of_values, WORDS, S, C // PER_WORD)
    q0, q1, unit = query_columns(q, R, q_head, D, KIND, HALVES)

    none = gl.zeros([S, HEADS], gl.float32, MMA)
    totals = lane_sums_columns(none)
    a0 = gl.zeros([C // PER_WORD, HEADS], gl.float32, MMA)
    a1 = a0
    across: gl.constexpr = gl.SliceLayout(0, MMA)
    down: gl.constexpr = gl.SliceLayout(1, MMA)
    unit = gl.convert_layout(unit, across) * (scale * LOG2_E)
    peak = gl.full_like(unit, float("-inf"))
    # One lane per position loads scales a tile ahead, and their page numbers two tiles ahead.
    by_lane: gl.constexpr = gl.BlockedLayout([S // 32], [32], [1], [0])
    places = gl.arange(0, S, layout=by_lane if KIND > 0 else down)
    if KIND > 0:
        page = page_at(table, begin + places, end, P)
        ks, vs = scales_at(scales, page, begin + places, end, P)
        page = page_at(table, begin + S + places, end, P)
    for t in range(count):
        start = begin + t * S
        slot = (done + t) % STAGES
        later = start + STAGES * S
        numbers = numbers_of(table, later, last, P, BOX, S)
        inside = start + places < end
        if KIND > 0:
            ahead = start + S + places
            next_ks, next_vs = scales_at(scales, page, ahead, end, P)
            page = page_at(table, ahead + S, end, P)
            factor, added, unscaled = factors_of(ks, vs, inside, down)
        else:
            added = gl.where(inside, 0.0, float("-inf"))
        mbarrier.wait(gates.index(slot), (done + t) // STAGES & 1)
        clear_beyond(keys, values, slot, end - start, HALVES)
        products = products_of_columns(q0, q1, keys, slot, none, KIND, HALVES)
        exponents = products * gl.expand_dims(unit, 0)
        if KIND > 0:
            exponents *= gl.expand_dims(factor, 1)
        exponents += gl.expand_dims(added, 1)
        new_peak = gl.maximum(peak, gl.max(exponents, 0))
        origin = origin_of(new_peak)
        shrink = power_of_two(peak - origin)
        peak = new_peak
        weights = power_of_two(exponents - gl.expand_dims(origin, 0))
        counted = weights
        if KIND > 0:
            counted = weights * gl.expand_dims(unscaled, 1)
            ks, vs = next_ks, next_vs
        totals *= down_lanes(shrink, totals)
        totals += lane_sums_columns(counted)
        w = weights_as_columns(weights.to(DTYPE))
        a0, a1 = applied_columns(w, values, slot, a0, a1, shrink, KIND, HALVES)
        together()
        fetch(pages, ring, slot, numbers, g, later, last, later < end, P, S, HALVES)
    total = gl.convert_layout(gl.sum(totals, 0), across, assert_trivial=True)
    a0, a1 = gl.permute(a0, [1, 0]), gl.permute(a1, [1, 0])
    return peak, total, (a0, a1, a0, a1), done + count
