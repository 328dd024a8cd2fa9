# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The product of `few_rows` for wide matrices: tiles come through a ring in shared memory.

A wide row keeps a program's registers busy for long, and a load that waits for a register comes
late. Here whole tiles are copied to shared memory, STAGES − 1 ahead, without any register: 16 bytes
a lane, a row's bytes side by side. What a lane multiplies is the same as there; it is read from
shared memory in the same order. Sixteen bytes of row r lie at place p ^ (r mod 8) of eight, so that
eight rows are read without two lanes asking one bank.

The width is a power of two: a row is WARPS · EACH groups, both powers of two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from trapline.gold.device import launched
from trapline.gold.gluon_compat import async_load
from trapline.gold.ternary.hopper.few_rows import (
    add_products,
    lanes,
    load_x,
    offsets,
    store,
    wait_for_the_kernel_before,
)

#: How a lane's g counts rows, in bits: rows 1, 2 and 4. Row 8 is the lane's second one.
_ROWS = ([1, 0], [2, 0], [4, 0])


@gluon.constexpr_function
def bits(number):
    return number.bit_length() - 1


@gluon.constexpr_function
def word_layout(warps, each):
    """(16, words): by register the word of two, the row of two, the group; c and g by lane."""
    registers = [[0, 1], [8, 0], *([0, 8 << bit] for bit in range(bits(each)))]
    dealt = [[0, 8 * each << bit] for bit in range(bits(warps))]
    lane = [[0, 2], [0, 4], *_ROWS]
    return gl.DistributedLinearLayout(registers, lane, dealt, [], [16, 8 * each * warps])


@gluon.constexpr_function
def scale_layout(warps, rows):
    """(16, groups): by register the column of two (or the set, with two rows of x) and the row."""
    columns = [[0, 1], [0, 2], [0, 4]]
    which = columns.pop(0 if rows == 1 else 2)
    dealt = [[0, 8 << bit] for bit in range(bits(warps))]
    return gl.DistributedLinearLayout(
        [which, [8, 0]], [*columns, *_ROWS], dealt, [], [16, 8 * warps]
    )


@gluon.constexpr_function
def mirrored(number, length):
    """The bits in reverse order, as `halves` returns them."""
    return sum((number >> bit & 1) << (length - 1 - bit) for bit in range(length))


@gluon.jit
def fetch(words, factors, planes, scales, tile, N, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Starts the copy of a tile's words and scales; nothing where there is no tile."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    row = tile * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, wide))[:, None]
    column = gl.arange(0, GROUPS * 8, layout=gl.SliceLayout(0, wide))[None, :]
    at = planes + row.to(gl.int64) * (GROUPS * 8) + column
    async_load(words, at, mask=(row < N) & (column < GROUPS * 8))
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    line = tile * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, narrow))[:, None]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, narrow))[None, :]
    place = scales + line.to(gl.int64) * GROUPS + group
    async_load(factors, place, mask=(line < N) & (group < GROUPS))
    async_copy.commit_group()


@gluon.jit
def halves(tensor, LENGTH: gl.constexpr):
    """A lane's registers one by one: the last axes of length two, the last of them first."""
    parts = gl.split(tensor)
    for bit in gl.static_range(1, LENGTH):
        more = ()
        for i in gl.static_range(2**bit):
            more = more + gl.split(parts[i])
        parts = more
    return parts


@gluon.jit
def in_order(parts, LENGTH: gl.constexpr, LANE: gl.constexpr):
    """The same in the order of the axes; nothing moves between lanes."""
    found = ()
    for i in gl.static_range(2**LENGTH):
        found = found + trivially(parts[mirrored(i, LENGTH)], LANE)
    return found


@gluon.jit
def trivially(tensor, LANE: gl.constexpr):
    return (gl.convert_layout(tensor, LANE, assert_trivial=True),)


@gluon.jit
def read_words(words, LANE: gl.constexpr, WARPS: gl.constexpr):
    """As `few_rows` holds them: of each group two words of row g, two of row g + 8."""
    layout: gl.constexpr = word_layout(WARPS, 8)
    tensor = gl.reshape(words.load(layout), [2, 8, WARPS, 8, 4, 2])
    tensor = gl.permute(tensor, [2, 1, 4, 3, 0, 5])
    return in_order(halves(gl.reshape(tensor, [WARPS, 8, 4, 2, 2, 2, 2, 2]), 5), 5, LANE)


@gluon.jit
def read_scales(factors, LANE: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr):
    """As `few_rows` holds them: of each set, for both columns, row g and row g + 8."""
    layout: gl.constexpr = scale_layout(WARPS, M)
    tensor = factors.load(layout)
    if M == 1:
        tensor = gl.permute(gl.reshape(tensor, [2, 8, WARPS, 4, 2]), [2, 1, 3, 4, 0])
        found = in_order(halves(tensor, 2), 2, LANE)
    else:
        tensor = gl.permute(gl.reshape(tensor, [2, 8, WARPS, 2, 4]), [2, 1, 4, 3, 0])
        each = in_order(halves(tensor, 2), 2, LANE)
        found = each[0], each[1], each[0], each[1], each[2], each[3], each[2], each[3]
    return found


@launched
@gluon.jit(do_not_specialize=["given", "N", "blocks"])
def ring_kernel(
    x, planes, scales, y, given, N, blocks,
    GROUPS: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, SETTLED: gl.constexpr,
):  # fmt: skip
    """y (given, N); x (given, K), planes (N, K/16) int32, scales (N, K/128); `blocks` programs.

    M is 1 or 2, a warp has 8 groups: K = 1024 WARPS. SETTLED as in `few_rows_kernel`.
    """
    lane = lanes(WARPS)
    none = (lane[3], lane[3], lane[3], lane[3])
    LANE: gl.constexpr = lane[3].type.layout
    BF16: gl.constexpr = x.dtype.element_ty == gl.bfloat16
    words = gl.allocate_shared_memory(
        gl.int32, [STAGES, 16, GROUPS * 8], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    factors = gl.allocate_shared_memory(
        gl.float16, [STAGES, 16, GROUPS], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    )
    tile = gl.program_id(0)
    if not SETTLED:
        wait_for_the_kernel_before()
    for i in gl.static_range(STAGES - 1):
        fetch(words.index(i), factors.index(i), planes, scales, tile + i * blocks, N, GROUPS, WARPS)
    if SETTLED:
        wait_for_the_kernel_before()
    part = load_x(x, lane[0] * 8, lane, given, GROUPS, M, 8)
    taken_off = offsets(part, none, M, BF16)
    slot = 0
    for now in range(tile, (N + 15) // 16, blocks):
        async_copy.wait_group(STAGES - 2)
        held = read_words(words.index(slot), LANE, WARPS)
        scaled = read_scales(factors.index(slot), LANE, M, WARPS)
        free = (slot + STAGES - 1) % STAGES
        ahead = now + (STAGES - 1) * blocks
        fetch(words.index(free), factors.index(free), planes, scales, ahead, N, GROUPS, WARPS)
        totals = add_products(none, held, scaled, part, taken_off, lane, M, 8, BF16)
        store(y, totals, now, given, N, M, WARPS)
        slot = (slot + 1) % STAGES
    async_copy.wait_group(0)
