# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""W2A16 for one to eight rows of x on tensor cores, in Gluon, for Hopper GPUs.

A matrix times one vector uses one of the eight columns of a tensor-core operand. Here the others
have their use too. Groups of 128 weights must be summed apart, since each has a scale of its own:
so column j holds the activations of group j. Where the weights are those of group j, column j of
the sums is kept and the others are thrown away. Eight groups share the registers of x, and no
multiplication by a scale stands inside a sum. With M rows of x, 8 / M groups lie abreast.

Each lane works by itself: a tensor (WARPS, 8, 4) has one number a lane. Lane (g, c) has rows g and
g + 8 of 16 rows of the matrix, a tile, and of each group the c-th quarter: 32 codes, 8 bytes, one
load a row. A row's groups are dealt to the warps; their sums meet in shared memory.

A program takes one tile, or stays for several: then x remains in registers, and the next tile is
asked for before this one is multiplied.
Shape letters: M rows of x (a power of two), N rows of the matrix, K columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trapline.gold.device import launched
from trapline.gold.ternary.hopper import ptx as text

_LOAD_X = gl.constexpr(text.load_x(4))
_LOAD_X_NEEDS = gl.constexpr(text.load_x_needs(4))
_PAIRS = gl.constexpr(text.pairs())
_PAIRS_NEEDS = gl.constexpr(text.PAIRS_NEEDS)
_BF16 = gl.constexpr(text.multiply("bf16"))
_F16 = gl.constexpr(text.multiply("f16"))
_MULTIPLY_NEEDS = gl.constexpr(text.MULTIPLY_NEEDS)
_BF16_ZEROS = gl.constexpr(text.zero_codes("bf16"))
_F16_ZEROS = gl.constexpr(text.zero_codes("f16"))
_ZEROS_NEEDS = gl.constexpr(text.ZERO_CODES_NEEDS)
_UNITS = gl.constexpr(text.CODE_UNITS)


@gluon.jit
def multiply(low, high, x, sums, BF16: gl.constexpr):
    ASM: gl.constexpr = _BF16 if BF16 else _F16
    return gl.inline_asm_elementwise(
        ASM, _MULTIPLY_NEEDS,
        [low, high, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
         sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.float32,) * 4, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def zero_codes(x, sums, BF16: gl.constexpr):
    ASM: gl.constexpr = _BF16_ZEROS if BF16 else _F16_ZEROS
    return gl.inline_asm_elementwise(
        ASM, _ZEROS_NEEDS,
        [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.float32,) * 4, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_the_kernel_before():
    """Waits for the results of the previous kernel and lets the next one start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def lanes(WARPS: gl.constexpr):
    """Every lane's warp, g and c, and a zero for each."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    all_of = gl.full([WARPS, 8, 4], 0, gl.int32, layout)
    zero = gl.full([WARPS, 8, 4], 0.0, gl.float32, layout)
    return w[:, None, None] + all_of, g[None, :, None] + all_of, c[None, None, :] + all_of, zero


@gluon.jit
def places(planes, scales, tile, first, lane, N, GROUPS: gl.constexpr, EACH: gl.constexpr):
    """Addresses of the lane's words and scales from group `first` on, for both rows.

    Where the matrix ends before, the last row is read again; the last groups are read by two warps
    where they cannot be dealt evenly, and count for the one with activations for them.
    """
    begin = gl.minimum(first, GROUPS - EACH)
    low = gl.minimum(tile * 16 + lane[1], N - 1).to(gl.int64)
    high = gl.minimum(tile * 16 + lane[1] + 8, N - 1).to(gl.int64)
    words = planes.to(gl.int64, bitcast=True) + begin * 32 + lane[2] * 8
    return (
        words + low * (GROUPS * 32), words + high * (GROUPS * 32),
        scales + low * GROUPS, scales + high * GROUPS, begin,
    )  # fmt: skip


@gluon.jit
def load_words(place, OFFSET: gl.constexpr):
    """Two words of a group at an offset; read-only for the whole kernel (`ld.global.nc`)."""
    return gl.inline_asm_elementwise(
        f"ld.global.nc.v2.b32 {{$0, $1}}, [$2+{OFFSET}];", "=r,=r,l",
        [place], dtype=(gl.int32,) * 2, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_group_words(at, EACH: gl.constexpr):
    """Four words of each of EACH groups: two of each row."""
    words = ()
    for i in gl.static_range(EACH):
        words = words + load_words(at[0], 32 * i) + load_words(at[1], 32 * i)
    return words


@gluon.jit
def load_both(low, high):
    return gl.load(low), gl.load(high)


@gluon.jit
def load_scales(at, c, GROUPS: gl.constexpr, M: gl.constexpr, EACH: gl.constexpr):
    """Scales of the lane's two columns of each set, for both rows."""
    factors = ()
    for s in gl.static_range((EACH * M + 7) // 8):
        for column in gl.static_range(2):
            group = gl.minimum(at[4] + s * (8 // M) + (2 * c + column) // M, GROUPS - 1)
            factors = factors + load_both(at[2] + group, at[3] + group)
    return factors


@gluon.jit
def load_x(x, first, lane, given, GROUPS: gl.constexpr, M: gl.constexpr, EACH: gl.constexpr):
    """16 registers a set of 8 columns; column g is a group and a row of x, zeros beyond them."""
    begin = gl.minimum(first, GROUPS - EACH)
    m = lane[1] % M
    loaded = ()
    for s in gl.static_range((EACH * M + 7) // 8):
        i = s * (8 // M) + lane[1] // M
        here = (i < EACH) & (begin + i >= first) & (m < given)
        at = x.to(gl.int64, bitcast=True) + m.to(gl.int64) * (GROUPS * 256)
        at += (begin + i) * 256 + lane[2] * 64
        loaded = loaded + gl.inline_asm_elementwise(
            _LOAD_X, _LOAD_X_NEEDS, [at, here.to(gl.int32)],
            dtype=(gl.int32,) * 16, is_pure=False, pack=1,
        )  # fmt: skip
    found = ()
    for p in gl.static_range((EACH * M + 7) // 8 * 2):
        found = found + gl.inline_asm_elementwise(
            _PAIRS, _PAIRS_NEEDS,
            [loaded[8 * p], loaded[8 * p + 1], loaded[8 * p + 2], loaded[8 * p + 3],
             loaded[8 * p + 4], loaded[8 * p + 5], loaded[8 * p + 6], loaded[8 * p + 7]],
            dtype=(gl.int32,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    return found


@gluon.jit
def offset(x, none, S: gl.constexpr, BF16: gl.constexpr):
    """The product of codes of 0 in the lane's two columns of set S."""
    even = zero_codes(x[16 * S : 16 * S + 8], none, BF16)
    odd = zero_codes(x[16 * S + 8 : 16 * S + 16], none, BF16)
    return even[0] + odd[0], even[1] + odd[1]


@gluon.jit
def offsets(x, none, SETS: gl.constexpr, BF16: gl.constexpr):
    found = ()
    for s in gl.static_range(SETS):
        found = found + offset(x, none, s, BF16)
    return found


@gluon.jit
def group_sums(words, x, none, G: gl.constexpr, S: gl.constexpr, BF16: gl.constexpr):
    """Group G of rows g and g + 8 times the columns of set S."""
    # Two sums side by side: the next step of one need not wait for the other.
    even = multiply(words[4 * G], words[4 * G + 2], x[16 * S : 16 * S + 8], none, BF16)
    odd = multiply(words[4 * G + 1], words[4 * G + 3], x[16 * S + 8 : 16 * S + 16], none, BF16)
    return even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]


@gluon.jit
def kept_sums(
    words, x, lane, S: gl.constexpr, M: gl.constexpr, EACH: gl.constexpr, BF16: gl.constexpr
):
    """For each column of set S, the sum of its own group."""
    _, _, c, zero = lane
    none = (zero, zero, zero, zero)
    kept = none
    for j in gl.static_range(8 // M):
        if S * (8 // M) + j < EACH:
            sums = group_sums(words, x, none, S * (8 // M) + j, S, BF16)
            left, right = 2 * c // M == j, (2 * c + 1) // M == j
            kept = (
                gl.where(left, sums[0], kept[0]),
                gl.where(right, sums[1], kept[1]),
                gl.where(left, sums[2], kept[2]),
                gl.where(right, sums[3], kept[3]),
            )
    return kept


@gluon.jit
def add_products(
    totals, words, factors, x, taken_off, lane,
    M: gl.constexpr, EACH: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Adds EACH more groups to the totals of rows g and g + 8 in the lane's two columns."""
    for s in gl.static_range((EACH * M + 7) // 8):
        kept = kept_sums(words, x, lane, s, M, EACH, BF16)
        left, right = taken_off[2 * s], taken_off[2 * s + 1]
        totals = (
            totals[0] + (kept[0] - left) * factors[4 * s].to(gl.float32),
            totals[1] + (kept[1] - right) * factors[4 * s + 2].to(gl.float32),
            totals[2] + (kept[2] - left) * factors[4 * s + 1].to(gl.float32),
            totals[3] + (kept[3] - right) * factors[4 * s + 3].to(gl.float32),
        )
    return totals


@gluon.jit
def add_both(a, b, more_a, more_b):
    return a + more_a, b + more_b


@gluon.jit
def by_row_of_x(left, right, M: gl.constexpr, WARPS: gl.constexpr):
    """(WARPS, 8, M) from the lane's two columns: groups of the same row of x are added up."""
    return gl.sum(gl.reshape(gl.join(left, right), [WARPS, 8, 8 // M, M]), 2)


@gluon.jit
def store(y, totals, tile, given, N, M: gl.constexpr, WARPS: gl.constexpr):
    """Stores 16 rows of y, summed over all warps."""
    low = by_row_of_x(totals[0], totals[1], M, WARPS)
    high = by_row_of_x(totals[2], totals[3], M, WARPS)
    low, high = gl.reduce((low, high), 0, add_both)
    layout: gl.constexpr = low.type.layout
    row = tile * 16 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))[:, None]
    m = gl.arange(0, M, layout=gl.SliceLayout(0, layout))[None, :]
    at = y + m.to(gl.int64) * N + row
    gl.store(at, (low * _UNITS).to(y.dtype.element_ty), mask=(row < N) & (m < given))
    gl.store(at + 8, (high * _UNITS).to(y.dtype.element_ty), mask=(row + 8 < N) & (m < given))


@launched
@gluon.jit(do_not_specialize=["given", "N", "blocks"])
def few_rows_kernel(
    x, planes, scales, y, given, N, blocks,
    GROUPS: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr,
    PASSES: gl.constexpr, STAYS: gl.constexpr, SETTLED: gl.constexpr,
):  # fmt: skip
    """y (given, N); x (given, K), planes (N, K/4) bytes, scales (N, K/128); `blocks` programs.

    A program goes through the groups of a tile in PASSES parts, or stays for more tiles in one.
    SETTLED: no kernel that may still run writes the weights; they are asked for before x is there.
    """
    lane = lanes(WARPS)
    none = (lane[3], lane[3], lane[3], lane[3])
    BF16: gl.constexpr = x.dtype.element_ty == gl.bfloat16
    tile = gl.program_id(0)
    first = lane[0] * EACH
    at = places(planes, scales, tile, first, lane, N, GROUPS, EACH)
    if not SETTLED:
        wait_for_the_kernel_before()
    words = load_group_words(at, EACH)
    factors = load_scales(at, lane[2], GROUPS, M, EACH)
    if SETTLED:
        wait_for_the_kernel_before()
    part = load_x(x, first, lane, given, GROUPS, M, EACH)
    taken_off = offsets(part, none, (EACH * M + 7) // 8, BF16)
    if STAYS:
        tiles = (N + 15) // 16
        for now in range(tile, tiles, blocks):
            later = words
            scaled = factors
            # A branch, not a mask: the compiler would move loads to the end of the loop.
            if now + blocks < tiles:
                at = places(planes, scales, now + blocks, first, lane, N, GROUPS, EACH)
                later = load_group_words(at, EACH)
                scaled = load_scales(at, lane[2], GROUPS, M, EACH)
            totals = add_products(none, words, factors, part, taken_off, lane, M, EACH, BF16)
            store(y, totals, now, given, N, M, WARPS)
            words = later
            factors = scaled
        return
    totals = none
    for p in gl.static_range(1, PASSES):
        first = (p * WARPS + lane[0]) * EACH
        at = places(planes, scales, tile, first, lane, N, GROUPS, EACH)
        later = load_group_words(at, EACH)
        scaled = load_scales(at, lane[2], GROUPS, M, EACH)
        totals = add_products(totals, words, factors, part, taken_off, lane, M, EACH, BF16)
        part = load_x(x, first, lane, given, GROUPS, M, EACH)
        taken_off = offsets(part, none, (EACH * M + 7) // 8, BF16)
        words = later
        factors = scaled
    totals = add_products(totals, words, factors, part, taken_off, lane, M, EACH, BF16)
    store(y, totals, tile, given, N, M, WARPS)
