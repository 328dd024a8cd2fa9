# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
"""Paged decoding for Hopper GPUs, in Gluon: operands made of codes, and a ring of tiles.

Integer codes are multiplied as integers: a tile has 16 rows and at most 8 queries, so rows 0 … 7
are the high bytes of 16-bit queries (or weights) and rows 8 … 15 the low ones; a row's two sums lie
in the same lane and make one exact integer. An 8-bit code is an operand as it is; a 4-bit code in
the upper half of a byte counts sixteen times. float8 becomes float16 by one instruction. The order
of positions and of elements is free if both operands agree on it. Values are loaded as words of two
bytes, transposed on the way, and the bytes of the four positions whose weights a lane holds go
together.

Tiles of keys and values are cut into boxes: the positions that a tile shares with one page. The
tensor memory accelerator fetches a box by its page number, and no lane computes an address. A gate
opens when all boxes of its tile have arrived.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trapline.gold.attention.paged.triton.pages import INT4, INT8
from trapline.gold.gluon_compat import reinterpret, tma_load

#: The tensor cores of one warp: 16 rows, 8 columns.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
#: A float32 as large as this has its integer in the lowest bits; 128 rounds the high byte.
MAGIC = gl.constexpr(12582912.0 + 128.0)
#: The largest 16-bit number whose high byte is rounded to 127 at most.
LARGEST = gl.constexpr(32512.0)
#: The smallest float16. A scale of 0 counts as this, so that its logarithm is finite.
SMALLEST = gl.constexpr(2.0**-24)
KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.constexpr_function
def whole(KIND):
    """Whether pages of this kind hold integers."""
    return KIND in (INT8, INT4)


@gluon.jit
def power_of_two(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2_of(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def origin_of(highest):
    """The number to subtract: 0 if no key was seen, because −∞ − (−∞) is NaN."""
    return gl.where(highest == float("-inf"), 0.0, highest)


@gluon.jit
def page_at(table, s, end, P: gl.constexpr):
    return gl.load(table + s // P, mask=s < end, other=0).to(gl.int64)


@gluon.jit
def scales_at(scales, page, s, end, P: gl.constexpr):
    """Scales of keys and values at positions s, on pages that are known."""
    k_scale, v_scale, ks_page, ks_place, vs_page, vs_place = scales
    ks = gl.load(k_scale + page * ks_page + s % P * ks_place, mask=s < end, other=0.0)
    vs = gl.load(v_scale + page * vs_page + s % P * vs_place, mask=s < end, other=0.0)
    return ks, vs


@gluon.jit
def factors_of(ks, vs, inside, layout: gl.constexpr):
    """A position's factor, the addend of its exponents, and the inverse of its scale."""
    # A value that could not be encoded has a scale of NaN, which must not become a small one.
    logarithm = log2_of(gl.maximum(vs.to(gl.float32), SMALLEST, propagate_nan=KEEP_NAN))
    added = gl.where(inside, logarithm, float("-inf"))
    factor = gl.convert_layout(ks.to(gl.float32), layout)
    unscaled = gl.convert_layout(power_of_two(-logarithm), layout)
    return factor, gl.convert_layout(added, layout), unscaled


@gluon.jit
def two_bytes(x):
    """(8, N) numbers up to LARGEST, rounded: (16, N) int8, the high bytes above the low ones."""
    N: gl.constexpr = x.shape[1]
    fixed = (x + MAGIC).to(gl.int32, bitcast=True)
    pair = gl.join((fixed >> 8).to(gl.int8), (fixed ^ 0x80).to(gl.int8))
    return gl.reshape(gl.permute(pair, [2, 0, 1]), [16, N])


@gluon.jit
def one_number(x):
    """(16, N) sums over high bytes and over low ones: (8, N) float32."""
    N: gl.constexpr = x.shape[1]
    high, low = gl.split(gl.permute(gl.reshape(x, [2, 8, N]), [1, 2, 0]))
    return (high * 256 + low).to(gl.float32)


@gluon.jit
def weights_in_bytes(weights):
    """(8, S) weights up to 1 as the first operand, positions in the order of `values_in_bytes`."""
    S: gl.constexpr = weights.shape[1]
    x = gl.reshape(two_bytes(weights * LARGEST), [16, S // 16, 2, 4, 2])
    x = gl.reshape(gl.permute(x, [0, 1, 3, 2, 4]), [16, S])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def values_in_bytes(words):
    """(S, N) words of two bytes as two second operands: the first bytes, the second bytes."""
    first, second = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=&r,=&r,r,r",
        [words],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    return by_lane(first), by_lane(second)


@gluon.jit
def by_lane(x):
    """Positions 2t, 2t + 1, 2t + 8, 2t + 9 of sixteen, which lane t holds, become 4t … 4t + 3."""
    S: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [S // 16, 2, 4, 2, N]), [0, 2, 1, 3, 4])
    return gl.convert_layout(
        gl.reshape(x, [S, N]), gl.DotOperandLayout(1, MMA, 4), assert_trivial=True
    )


@gluon.jit
def nibbles(codes):
    """Bytes of two 4-bit codes: sixteen times the lower ones, sixteen times the upper ones."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xf0f0f0f0; and.b32 $1, $2, 0xf0f0f0f0; }",
        "=&r,=&r,r",
        [codes],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def keys_in_floats(words):
    """Words of two float8, two words of a key: elements 4n and 4n + 1, elements 4n + 2, 4n + 3."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 h, i; mov.b32 {h, i}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, h; cvt.rn.f16x2.e4m3x2 $1, i; }",
        "=&r,=&r,r",
        [words],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def values_in_floats(words):
    """Words of two float8 of two positions: even elements, odd elements."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 h, i; prmt.b32 t, $2, $2, 0x3120; mov.b32 {h, i}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, h; cvt.rn.f16x2.e4m3x2 $1, i; }",
        "=&r,=&r,r",
        [words],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


# --- a ring of tiles that the copy engine fetches ahead of their use ----------------------------


@gluon.jit
def prefetch(pointer):
    """Prefetch a line into the L2 cache; another kernel may still write to it."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointer],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_where(pointers, wanted):
    """Prefetch those lines that are wanted into the L2 cache."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def ring_for(pages, BOXES: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for STAGES tiles of BOXES boxes, and their gates."""
    k_pages, v_pages = pages
    shape: gl.constexpr = k_pages.block_type.shape
    room: gl.constexpr = [STAGES * BOXES, 1, 1, shape[2], shape[3]]
    keys = gl.allocate_shared_memory(k_pages.dtype, room, k_pages.layout)
    values = gl.allocate_shared_memory(v_pages.dtype, room, v_pages.layout)
    gates = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(gates.index(stage), count=1)
    return keys, values, gates


@gluon.jit
def numbers_of(table, s, last, P: gl.constexpr, BOX: gl.constexpr, S: gl.constexpr):
    """The pages of the boxes from position s on; beyond the last position, its page."""
    found = ()
    for j in gl.static_range(S // BOX):
        found += (gl.load(table + gl.minimum(s + j * BOX, last) // P),)
    return found


@gluon.jit
def fetch(
    pages, ring, slot, numbers, g, s, last, wanted, P: gl.constexpr, S: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Fetch the tile from position s on, if wanted; rows over 128 bytes come in halves."""
    k_pages, v_pages = pages
    keys, values, gates = ring
    BOX: gl.constexpr = k_pages.block_type.shape[2]
    C: gl.constexpr = k_pages.block_type.shape[3]
    NB: gl.constexpr = S // BOX
    gate = gates.index(slot)
    mbarrier.expect(gate, 2 * HALVES * NB * k_pages.block_type.nbytes, pred=wanted)
    for j in gl.static_range(NB):
        for h in gl.static_range(HALVES):
            box = [numbers[j], g, gl.minimum(s + j * BOX, last) % P // BOX * BOX, h * C]
            to = keys.index((slot * HALVES + h) * NB + j)
            tma_load(k_pages, box, gate, to, pred=wanted)
    for j in gl.static_range(NB):
        for h in gl.static_range(HALVES):
            box = [numbers[j], g, gl.minimum(s + j * BOX, last) % P // BOX * BOX, h * C]
            to = values.index((slot * HALVES + h) * NB + j)
            tma_load(v_pages, box, gate, to, pred=wanted)


@gluon.jit
def first_tiles(
    table, pages, ring, g, begin, count, last, done, P: gl.constexpr, S: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Fetch as many of `count` tiles as the ring holds; `done` went through it before.

    All page numbers are loaded before the first is used: one wait for memory, not one per tile.
    """
    STAGES: gl.constexpr = ring[2].shape[0]
    BOX: gl.constexpr = pages[0].block_type.shape[2]
    NB: gl.constexpr = S // BOX
    found = ()
    for j in gl.static_range(STAGES * NB):
        at = table + gl.minimum(begin + j * BOX, last) // P
        found += (gl.load(at, mask=count > 0, other=0),)
    for j in gl.static_range(STAGES):
        numbers = ()
        for i in gl.static_range(NB):
            numbers += (found[j * NB + i],)
        s = begin + j * S
        fetch(pages, ring, (done + j) % STAGES, numbers, g, s, last, j < count, P, S, HALVES)


@gluon.jit
def as_tiles(boxes, dtype: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The ring as tiles of S rows of C elements."""
    bits: gl.constexpr = dtype.primitive_bitwidth
    tiles: gl.constexpr = boxes.shape[0] * boxes.shape[3] // S
    layout: gl.constexpr = gl.NVMMASharedLayout(C * bits // 8, bits, 2)
    return reinterpret(boxes, dtype, [tiles, S, C], layout)


@gluon.jit
def together():
    """Wait until all lanes have done what comes before."""
    tl.debug_barrier()


@gluon.jit
def clear_from(tile, left):
    """Zero the rows from `left` on: a weight of 0 does not hide NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    x = tile.load(layout)
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    tile.store(gl.where(gl.expand_dims(row < left, 1), x, gl.zeros_like(x)))


@gluon.jit
def clear_beyond(keys, values, slot, left, HALVES: gl.constexpr):
    """Zero the rows of a tile beyond the last position, if there are any."""
    if left < keys.shape[1]:
        for h in gl.static_range(HALVES):
            clear_from(keys.index(slot * HALVES + h), left)
            clear_from(values.index(slot * HALVES + h), left)
        together()


# --- storing rows, and merging the parts of several programs --------------------------------------


@gluon.jit
def merge(
    parts, stats, out, first, last, row, R, out_head,
    D: gl.constexpr, M: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Merge the parts of programs first … last, in order, into the R heads from `out + row` on.

    The first program ended with these rows and stored them second (slot 2p + 1); the others began
    with them. ROWS: at least R.
    """
    # Few rows per lane: every lane of a row loads the row's two statistics.
    TALL: gl.constexpr = ROWS if ROWS < 8 else 8
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [TALL, 32 // TALL], [1, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    # As many as 128 registers hold, but no more parts than a small launch has of a row.
    TOGETHER: gl.constexpr = 4096 // (ROWS * D) if ROWS * D > 256 else 16
    r = gl.arange(0, ROWS, layout=by_row)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    live = r < R
    peak = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    total = gl.zeros([ROWS], gl.float32, by_row)
    acc = gl.zeros([ROWS, D], gl.float32, layout)
    for p in range(first, last + 1, TOGETHER):
        peaks = ()
        totals = ()
        sums = ()
        new_peak = peak
        for j in gl.static_range(TOGETHER):
            there = live & (p + j <= last)
            slot = (2 * (p + j) + gl.where(p + j == first, 1, 0)).to(gl.int64) * M + r
            # Another multiprocessor wrote them: this one's cache may be stale.
            at = stats + slot * 2
            m = gl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
            peaks += (m,)
            totals += (gl.load(at + 1, mask=there, other=0.0, cache_modifier=".cg"),)
            inside = gl.expand_dims(there, 1)
            at = parts + gl.expand_dims(slot, 1) * D + gl.expand_dims(d, 0)
            sums += (gl.load(at, mask=inside, other=0.0, cache_modifier=".cg"),)
        for j in gl.static_range(TOGETHER):
            new_peak = gl.maximum(new_peak, peaks[j])
        origin = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        c = power_of_two(peak - origin)
        total *= c
        acc *= gl.expand_dims(c, 1)
        for j in gl.static_range(TOGETHER):
            c = power_of_two(peaks[j] - origin)
            total += totals[j] * c
            acc += sums[j] * gl.expand_dims(c, 1)
        peak = new_peak
    answer = acc * gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 1)
    at = out + row + gl.expand_dims(r.to(gl.int64) * out_head, 1) + gl.expand_dims(d, 0)
    gl.store(at, answer.to(out.dtype.element_ty), mask=gl.expand_dims(live, 1))


@gluon.jit
def store_piece(base, a, factor, live, row, STEP: gl.constexpr, FROM: gl.constexpr):
    """Every STEP-th element from FROM on of rows that begin at base + row."""
    layout: gl.constexpr = a.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.arange(0, a.shape[1], layout=gl.SliceLayout(0, layout)) * STEP + FROM
    factor = gl.expand_dims(gl.convert_layout(factor, by_row), 1)
    at = base + gl.expand_dims(gl.convert_layout(row, by_row), 1) + gl.expand_dims(d, 0)
    mask = gl.expand_dims(gl.convert_layout(live, by_row), 1)
    gl.store(at, (a * factor).to(base.dtype.element_ty), mask=mask)


@gluon.jit
def store_rows(
    base, sums, factor, live, row, D: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """Store all pieces at the places of their elements."""
    a0, a1, a2, a3 = sums
    STEP: gl.constexpr = 1 if KIND == 0 else 2
    SECOND: gl.constexpr = D // 2 if KIND == 0 or KIND == INT4 else 1
    store_piece(base, a0, factor, live, row, STEP, 0)
    if KIND > 0 or HALVES == 2:
        store_piece(base, a1, factor, live, row, STEP, SECOND)
    if KIND == INT4:
        store_piece(base, a2, factor, live, row, STEP, 1)
        store_piece(base, a3, factor, live, row, STEP, 1 + SECOND)
