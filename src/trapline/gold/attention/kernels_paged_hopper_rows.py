# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The heads of one query over a run of keys, by one warp (Gluon): the loop of Hopper's decoding.

The recurrence and what is done with scales are those of `kernels_paged_rows`. Of sums there are up
to four pieces, whose elements lie apart as the codes do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trapline.gold.attention.kernels_paged_codes import FP8, INT4, INT8
from trapline.gold.attention.kernels_paged_hopper_codes import (
    LARGEST,
    MMA,
    keys_in_floats,
    log2_of,
    nibbles,
    one_number,
    power_of_two,
    two_bytes,
    values_in_bytes,
    values_in_floats,
    weights_in_bytes,
    whole,
)
from trapline.gold.attention.kernels_paged_hopper_ring import (
    as_tiles,
    clear_beyond,
    fetch,
    first_tiles,
    numbers_of,
    together,
)

LOG2_E = gl.constexpr(1.4426950408889634)
#: The smallest float16. A scale of 0 counts as this, so that its logarithm is finite.
SMALLEST = gl.constexpr(2.0**-24)
A_16 = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
B_16 = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
A_8 = gl.constexpr(gl.DotOperandLayout(0, MMA, 4))
B_8 = gl.constexpr(gl.DotOperandLayout(1, MMA, 4))


@gluon.jit
def nothing(N: gl.constexpr, KIND: gl.constexpr):
    """Sums of nothing, (rows, N), where the tensor cores leave them: 8 rows of integers, or 16."""
    if whole(KIND):
        sums = one_number(gl.zeros([16, N], gl.int32, MMA))
    else:
        sums = gl.zeros([16, N], gl.float32, MMA)
    return sums


@gluon.jit
def query_piece(q, R, q_head, N: gl.constexpr, FROM: gl.constexpr, KIND: gl.constexpr):
    """N elements of every head from FROM on; for float8, every other pair of elements."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    r = gl.arange(0, 8 if whole(KIND) else 16, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    if KIND == FP8:
        d = d // 2 * 4 + d % 2
    at = q + gl.expand_dims(r * q_head, 1) + gl.expand_dims(d + FROM, 0)
    return gl.load(at, mask=gl.expand_dims(r < R, 1), other=0.0)


@gluon.jit
def queries_of(q, R, q_head, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr):
    """The two pieces of the queries that meet those of keys, and each row's unit."""
    FIRST: gl.constexpr = D // 2 if (KIND > INT8) or HALVES == 2 else D
    SECOND: gl.constexpr = 2 if KIND == FP8 else D // 2
    x0 = query_piece(q, R, q_head, FIRST, 0, KIND)
    x1 = x0
    if FIRST < D:
        x1 = query_piece(q, R, q_head, FIRST, SECOND, KIND)
    largest = gl.max(gl.maximum(gl.abs(x0), gl.abs(x1)).to(gl.float32), 1)
    if KIND == 0:
        unit = gl.full_like(largest, 1.0)
        q0 = gl.convert_layout(x0, A_16)
        q1 = gl.convert_layout(x1, A_16)
    elif KIND == FP8:
        # The power of two below the largest: nothing is rounded, nothing overflows float16.
        exponent = gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 1 << 23)
        unit = exponent.to(gl.float32, bitcast=True)
        inverse = gl.expand_dims((0x7F000000 - exponent).to(gl.float32, bitcast=True), 1)
        q0 = gl.convert_layout((x0.to(gl.float32) * inverse).to(gl.float16), A_16)
        q1 = gl.convert_layout((x1.to(gl.float32) * inverse).to(gl.float16), A_16)
    else:
        largest = gl.maximum(largest, 1e-30)
        # No integer is NaN: the unit of its row is.
        unit = largest / LARGEST + gl.sum(x0.to(gl.float32) * 0.0 + x1.to(gl.float32) * 0.0, 1)
        inverse = gl.expand_dims(LARGEST / largest, 1)
        q0 = gl.convert_layout(two_bytes(x0.to(gl.float32) * inverse), A_8)
        q1 = gl.convert_layout(two_bytes(x1.to(gl.float32) * inverse), A_8)
        if KIND == INT4:
            unit /= 16.0
    return q0, q1, unit


@gluon.jit
def products_of(q0, q1, keys, slot, S: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr):
    """Queries times the keys of a tile, (rows, S)."""
    if whole(KIND):
        codes = keys.index(slot).permute([1, 0]).load(B_8)
        sums = gl.zeros([16, S], gl.int32, MMA)
        if KIND == INT8:
            sums = mma_v2(q0, codes, sums)
        else:
            k0, k1 = nibbles(codes)
            sums = mma_v2(q1, k1, mma_v2(q0, k0, sums))
        products = one_number(sums)
    elif KIND == FP8:
        k0, k1 = keys_in_floats(keys.index(slot).permute([1, 0]).load(B_16))
        products = mma_v2(q1, k1, mma_v2(q0, k0, gl.zeros([16, S], gl.float32, MMA)))
    else:
        k0 = keys.index(slot * HALVES).permute([1, 0]).load(B_16)
        products = mma_v2(q0, k0, gl.zeros([16, S], gl.float32, MMA))
        if HALVES == 2:
            k1 = keys.index(slot * HALVES + 1).permute([1, 0]).load(B_16)
            products = mma_v2(q1, k1, products)
    return products


@gluon.jit
def applied(
    weights, values, slot, sums, shrink, grow, KIND: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """What was summed before, shrunk, and weights times the values of a tile, grown."""
    a0, a1, a2, a3 = sums
    N: gl.constexpr = a0.shape[1]
    by_row: gl.constexpr = gl.SliceLayout(1, a0.type.layout)
    c = gl.expand_dims(gl.convert_layout(shrink, by_row, assert_trivial=True), 1)
    if whole(KIND):
        w = weights_in_bytes(weights)
        f = gl.expand_dims(gl.convert_layout(grow, by_row, assert_trivial=True), 1)
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
    elif KIND == FP8:
        w = gl.convert_layout(weights.to(gl.float16), A_16)
        v0, v1 = values_in_floats(values.index(slot).load(B_16))
        a0 = mma_v2(w, v0, a0 * c)
        a1 = mma_v2(w, v1, a1 * c)
    else:
        w = gl.convert_layout(weights.to(values.dtype), A_16)
        a0 = mma_v2(w, values.index(slot * HALVES).load(B_16), a0 * c)
        if HALVES == 2:
            a1 = mma_v2(w, values.index(slot * HALVES + 1).load(B_16), a1 * c)
    return a0, a1, a2, a3


@gluon.jit
def origin_of(highest):
    """What is subtracted: 0 for a row that has seen no key, as −∞ − (−∞) is not a number."""
    return gl.where(highest == float("-inf"), 0.0, highest)


@gluon.jit
def weigh(exponents, peak, KIND: gl.constexpr):
    """Weights, the new peak, what earlier sums shrink by, and by what this tile's are multiplied.

    Weights of 16 bits are relative to the largest of their own tile: one weight far above all
    others must not round all others to nothing.
    """
    highest = gl.max(exponents, 1)
    new_peak = gl.maximum(peak, highest)
    origin = origin_of(new_peak)
    shrink = power_of_two(peak - origin)
    if whole(KIND):
        grow = power_of_two(highest - origin)
        origin = origin_of(highest)
    else:
        grow = gl.full_like(shrink, 1.0)
    weights = power_of_two(exponents - gl.expand_dims(origin, 1))
    return weights, new_peak, shrink, grow


@gluon.jit
def lane_sums(weights):
    """(rows, 8): sums of what a lane holds of a row; lanes meet once, at the end."""
    rows: gl.constexpr = weights.shape[0]
    S: gl.constexpr = weights.shape[1]
    return gl.sum(gl.reshape(weights, [rows, S // 8, 8]), 1)


@gluon.jit
def across_lanes(by_row, totals):
    layout: gl.constexpr = gl.SliceLayout(1, totals.type.layout)
    return gl.expand_dims(gl.convert_layout(by_row, layout, assert_trivial=True), 1)


@gluon.jit
def scales_at(scales, page, s, end, P: gl.constexpr):
    """Scales of keys and values at positions s, on pages that are known."""
    k_scale, v_scale, ks_page, ks_place, vs_page, vs_place = scales
    ks = gl.load(k_scale + page * ks_page + s % P * ks_place, mask=s < end, other=0.0)
    vs = gl.load(v_scale + page * vs_page + s % P * vs_place, mask=s < end, other=0.0)
    return ks, vs


@gluon.jit
def page_at(table, s, end, P: gl.constexpr):
    return gl.load(table + s // P, mask=s < end, other=0).to(gl.int64)


@gluon.jit
def columns_of(ks, vs, inside, layout: gl.constexpr):
    """A column's factor, what is added to its exponents, and what takes its scale out again."""
    logarithm = log2_of(gl.maximum(vs.to(gl.float32), SMALLEST))
    column = gl.where(inside, logarithm, float("-inf"))
    factor = gl.convert_layout(ks.to(gl.float32), layout)
    unscaled = gl.convert_layout(power_of_two(-logarithm), layout)
    return factor, gl.convert_layout(column, layout), unscaled


@gluon.jit
def attended(
    q, table, pages, ring, scales, g, R, begin, end, done, scale, q_head,
    P: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The R heads from q on over the positions begin … end; `done` tiles went through the ring.

    Answers each row's largest exponent (base 2), its sum of weights, and its weighted sum of
    values in four pieces.
    """
    boxes_of_keys, boxes_of_values, gates = ring
    STAGES: gl.constexpr = gates.shape[0]
    BOX: gl.constexpr = pages[0].block_type.shape[2]
    C: gl.constexpr = pages[0].block_type.shape[3]
    WORDS: gl.constexpr = pages[0].dtype if KIND == 0 else gl.int16
    PER_WORD: gl.constexpr = 1 if KIND == 0 else 2
    last = end - 1
    count = gl.cdiv(end - begin, S)
    first_tiles(table, pages, ring, g, begin, count, last, done, P, S, HALVES)
    values = as_tiles(boxes_of_values, WORDS, S, C // PER_WORD)
    if whole(KIND):
        keys = as_tiles(boxes_of_keys, gl.int8, S, C)
    else:
        keys = as_tiles(boxes_of_keys, WORDS, S, C // PER_WORD)
    q0, q1, unit = queries_of(q, R, q_head, D, KIND, HALVES)

    scores = nothing(S, KIND)
    totals = lane_sums(scores)
    a = nothing(C if KIND == 0 else C // 2, KIND)
    sums = a, a, a, a
    layout: gl.constexpr = scores.type.layout
    across: gl.constexpr = gl.SliceLayout(0, layout)
    unit = gl.convert_layout(unit, gl.SliceLayout(1, layout)) * (scale * LOG2_E)
    peak = gl.full_like(unit, float("-inf"))
    # Scales are loaded by one lane a position, a tile ahead, and their page numbers another one.
    by_lane: gl.constexpr = gl.BlockedLayout([S // 32], [32], [1], [0])
    places = gl.arange(0, S, layout=by_lane if KIND > 0 else across)
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
            factor, column, unscaled = columns_of(ks, vs, inside, across)
        else:
            column = gl.where(inside, 0.0, float("-inf"))
        mbarrier.wait(gates.index(slot), (done + t) // STAGES & 1)
        if not whole(KIND):
            clear_beyond(keys, values, slot, end - start, HALVES)
        products = products_of(q0, q1, keys, slot, S, KIND, HALVES)
        exponents = products * gl.expand_dims(unit, 1)
        if KIND > 0:
            exponents *= gl.expand_dims(factor, 0)
        exponents += gl.expand_dims(column, 0)
        weights, peak, shrink, grow = weigh(exponents, peak, KIND)
        counted = weights
        if KIND > 0:
            counted = weights * gl.expand_dims(unscaled, 0)
            ks, vs = next_ks, next_vs
        totals *= across_lanes(shrink, totals)
        totals += lane_sums(counted) * across_lanes(grow, totals)
        sums = applied(weights, values, slot, sums, shrink, grow, KIND, HALVES)
        together()
        fetch(pages, ring, slot, numbers, g, later, last, later < end, P, S, HALVES)
    total = gl.convert_layout(gl.sum(totals, 1), gl.SliceLayout(1, layout), assert_trivial=True)
    return peak, total, sums, done + count
