# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,untyped-decorator"
"""Tiles of keys and values that one warp has the copy engine fetch ahead of their use (Gluon).

A tile is cut into boxes: the positions that it shares with one page. The tensor memory accelerator
fetches a box by its page's number; no lane computes an address. A ring has some tiles; a gate opens
when all boxes of its tile have come.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trapline.gold.gluon_compat import tma_load


@gluon.jit
def prefetch(pointer):
    """Asks for a line of the L2 cache: it may come from another kernel's writes at any time."""
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
    """Asks for lines of the L2 cache, those that are wanted."""
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
    """Room for tiles of so many boxes, and their gates."""
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
    """The pages of the boxes from position s on; beyond the last position, its page again."""
    found = ()
    for j in gl.static_range(S // BOX):
        found += (gl.load(table + gl.minimum(s + j * BOX, last) // P),)
    return found


@gluon.jit
def fetch(
    pages, ring, slot, numbers, g, s, last, wanted, P: gl.constexpr, S: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Asks for the tile from position s on, if it is wanted; rows over 128 bytes come in halves."""
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
    """Asks for as many of `count` tiles as the ring has room for; `done` went through it before.

    All page numbers are loaded before the first is used: one wait for the memory, not one a tile.
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
    return boxes._reinterpret(dtype, [tiles, S, C], layout)


@gluon.jit
def together():
    """All lanes have done what comes before."""
    tl.debug_barrier()


@gluon.jit
def clear_from(tile, left):
    """Zeroes the rows from `left` on: a weight of 0 does not hide what is not a number."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    x = tile.load(layout)
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    tile.store(gl.where(gl.expand_dims(row < left, 1), x, gl.zeros_like(x)))


@gluon.jit
def clear_beyond(keys, values, slot, left, HALVES: gl.constexpr):
    """Clears what a tile has beyond the last position, if it has."""
    if left < keys.shape[1]:
        for h in gl.static_range(HALVES):
            clear_from(keys.index(slot * HALVES + h), left)
            clear_from(values.index(slot * HALVES + h), left)
        together()
