# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The heads of one query over a run of integer codes, by one warp (Gluon): heads are rows.

The recurrence and what is done with scales are those of `kernels_paged_rows`. Of a tile's 16 rows,
8 are high bytes and 8 low bytes (`kernels_paged_hopper_codes`). Of sums there are up to four
pieces, whose elements lie apart as the codes do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trapline.gold.attention.paged.hopper.codes import (
    LARGEST,
    MMA,
    factors_of,
    nibbles,
    one_number,
    origin_of,
    page_at,
    power_of_two,
    scales_at,
    two_bytes,
    values_in_bytes,
    weights_in_bytes,
)
from trapline.gold.attention.paged.hopper.ring import (
    as_tiles,
    fetch,
    first_tiles,
    numbers_of,
    together,
)
from trapline.gold.attention.paged.triton.codes import INT4, INT8
from trapline.gold.device import LOG2_E

A_8 = gl.constexpr(gl.DotOperandLayout(0, MMA, 4))
B_8 = gl.constexpr(gl.DotOperandLayout(1, MMA, 4))
B_16 = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def nothing(N: gl.constexpr):
    """Sums of nothing, (8, N), where the tensor cores leave them."""
    return one_number(gl.zeros([16, N], gl.int32, MMA))


@gluon.jit
def query_piece(q, R, q_head, N: gl.constexpr, FROM: gl.constexpr):
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
    x0 = query_piece(q, R, q_head, FIRST, 0)
    x1 = x0
    if FIRST < D:
        x1 = query_piece(q, R, q_head, FIRST, D // 2)
    largest = gl.max(gl.maximum(gl.abs(x0), gl.abs(x1)).to(gl.float32), 1)
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
def products_of(q0, q1, keys, slot, S: gl.constexpr, KIND: gl.constexpr):
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
def applied(weights, values, slot, sums, shrink, grow, KIND: gl.constexpr):
    """What was summed before, shrunk, and weights times the values of a tile, grown."""
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
    """Weights, the new peak, what earlier sums shrink by, and by what this tile's are multiplied.

    Weights of 16 bits are relative to the largest of their own tile: one weight far above all
    others must not round all others to nothing.
    """
    highest = gl.max(exponents, 1)
    new_peak = gl.maximum(peak, highest)
    origin = origin_of(new_peak)
    shrink = power_of_two(peak - origin)
    grow = power_of_two(highest - origin)
    weights = power_of_two(exponents - gl.expand_dims(origin_of(highest), 1))
    return weights, new_peak, shrink, grow


@gluon.jit
def lane_sums(weights):
    """(8, 8): sums of what a lane holds of a row; lanes meet once, at the end."""
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

    Answers each row's largest exponent (base 2), its sum of weights, and its weighted sum of
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
    totals = lane_sums(scores)
    a = nothing(C // 2)
    sums = a, a, a, a
    layout: gl.constexpr = scores.type.layout
    across: gl.constexpr = gl.SliceLayout(0, layout)
    unit = gl.convert_layout(unit, gl.SliceLayout(1, layout)) * (scale * LOG2_E)
    peak = gl.full_like(unit, float("-inf"))
    # Scales are loaded by one lane a position, a tile ahead, and their page numbers another one.
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
        products = products_of(q0, q1, keys, slot, S, KIND)
        exponents = products * gl.expand_dims(unit, 1)
        exponents = exponents * gl.expand_dims(factor, 0) + gl.expand_dims(added, 0)
        weights, peak, shrink, grow = weigh(exponents, peak)
        counted = weights * gl.expand_dims(unscaled, 0)
        ks, vs = next_ks, next_vs
        totals *= across_lanes(shrink, totals)
        totals += lane_sums(counted) * across_lanes(grow, totals)
        sums = applied(weights, values, slot, sums, shrink, grow, KIND)
        together()
        fetch(pages, ring, slot, numbers, g, later, last, later < end, P, S, 1)
    total = gl.convert_layout(gl.sum(totals, 1), gl.SliceLayout(1, layout), assert_trivial=True)
    return peak, total, sums, done + count
