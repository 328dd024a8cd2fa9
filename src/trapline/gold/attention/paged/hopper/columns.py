# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The heads of one query over a run of keys in floats, by one warp (Gluon): heads are columns.

A tensor-core tile has 16 rows and 8 columns. With keys as the rows nothing of it is padding when a
group has 8 heads, and scores and sums take half the registers and instructions of the other way.
Scores come out with a position a row; transposed within the warp they are weights that meet the
values, whose elements are the rows. 16-bit pages are operands as they are, float8 is decoded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trapline.gold.attention.paged.hopper.codes import (
    MMA,
    factors_of,
    keys_in_floats,
    origin_of,
    page_at,
    power_of_two,
    scales_at,
    values_in_floats,
)
from trapline.gold.attention.paged.hopper.ring import (
    as_tiles,
    clear_beyond,
    fetch,
    first_tiles,
    numbers_of,
    together,
)
from trapline.gold.attention.paged.triton.codes import FP8
from trapline.gold.device import LOG2_E

#: The columns of a tile: there may be fewer heads.
HEADS = gl.constexpr(8)
A = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def query_piece(q, R, q_head, N: gl.constexpr, FROM: gl.constexpr, KIND: gl.constexpr):
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
    x0 = query_piece(q, R, q_head, FIRST, 0, KIND)
    x1 = x0
    if FIRST < D:
        x1 = query_piece(q, R, q_head, FIRST, SECOND, KIND)
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
def products_of(q0, q1, keys, slot, none, KIND: gl.constexpr, HALVES: gl.constexpr):
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
def applied(w, values, slot, a0, a1, shrink, KIND: gl.constexpr, HALVES: gl.constexpr):
    """What was summed before, shrunk, and the values of a tile times weights."""
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
    """(S, HEADS) weights where products left them, as the second operand."""
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
def lane_sums(weights):
    """(8, HEADS): sums of what a lane holds of a column; lanes meet once, at the end."""
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
    """As `attended` of `kernels_paged_hopper_rows`, of floats."""
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
    totals = lane_sums(none)
    a0 = gl.zeros([C // PER_WORD, HEADS], gl.float32, MMA)
    a1 = a0
    across: gl.constexpr = gl.SliceLayout(0, MMA)
    down: gl.constexpr = gl.SliceLayout(1, MMA)
    unit = gl.convert_layout(unit, across) * (scale * LOG2_E)
    peak = gl.full_like(unit, float("-inf"))
    # Scales are loaded by one lane a position, a tile ahead, and their page numbers another one.
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
        products = products_of(q0, q1, keys, slot, none, KIND, HALVES)
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
        totals += lane_sums(counted)
        w = weights_as_columns(weights.to(DTYPE))
        a0, a1 = applied(w, values, slot, a0, a1, shrink, KIND, HALVES)
        together()
        fetch(pages, ring, slot, numbers, g, later, last, later < end, P, S, HALVES)
    total = gl.convert_layout(gl.sum(totals, 0), across, assert_trivial=True)
    a0, a1 = gl.permute(a0, [1, 0]), gl.permute(a1, [1, 0])
    return peak, total, (a0, a1, a0, a1), done + count
