# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel of `many_rows`: codes become the first operand of the tensor cores in registers.

A program has several warpgroups that compute, each for its own rows of the matrix, and one warp
that copies codes and x to shared memory for them. A lane reads whole groups of its rows (the lanes
that share a row read the same words) and cuts out the codes that its place in the operand needs
(`ptx.unpack_quarter`). So the numbers never pass through shared memory, and warpgroups need no
common barrier: one multiplies while another unpacks.
Sums of a group are multiplied by its scales in float32 and added up. Where both would not fit the
registers there is one set, in units of the scale of the group at hand (IN_UNITS): from group to
group it is multiplied by the ratio of the scales.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trapline.gold.device import launched
from trapline.gold.gluon_compat import tma_load
from trapline.gold.ternary.hopper import ptx as text
from trapline.gold.ternary.hopper.few_rows import wait_for_the_kernel_before

_BF16 = gl.constexpr(text.unpack_quarter("bf16"))
_F16 = gl.constexpr(text.unpack_quarter("f16"))
_NEEDS = gl.constexpr(text.UNPACK_QUARTER_NEEDS)
_UNITS = gl.constexpr(text.CODE_UNITS)
#: A word of 16 codes of 0, each stored as 1.
_NOTHING = gl.constexpr(0x55555555)
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def tile_layout(rows: int, dtype: Any) -> Any:
    """How a group of some rows of x lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, 128], dtype)


def codes_layout(rows: int, pack: int) -> Any:
    """How the words of `pack` groups of some rows of the matrix lie in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, 8 * pack], gl.int32)


@gluon.constexpr_function
def sums_layout(rows_of_x):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows_of_x, 16])


@gluon.constexpr_function
def quarter_layout(rows):
    """(rows, 8 words of a group, 4 quarters of a word), as the first operand lies in lanes."""
    registers = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [8, 0, 0]]
    registers += [[64, 0, 0]] if rows == 128 else []
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, 8, 4])


@gluon.constexpr_function
def word_layout(rows):
    return gl.SliceLayout(2, quarter_layout(rows))


@gluon.jit
def unpacked(words, DTYPE: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr):
    """(ROWS, 128) numbers of DTYPE, as the first operand, from (ROWS, 8) words."""
    ASM: gl.constexpr = _BF16 if DTYPE.is_bf16() else _F16
    layout: gl.constexpr = quarter_layout(ROWS)
    operand: gl.constexpr = gl.DotOperandLayout(0, sums_layout(BLOCK_M), 2)
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    shift = gl.expand_dims(gl.expand_dims(quarter * 4, 0), 0)
    words, shift = gl.broadcast(gl.expand_dims(words, 2), shift)
    p = gl.inline_asm_elementwise(
        ASM, _NEEDS, [words, shift], dtype=(gl.int16,) * 4, is_pure=True, pack=1
    )
    # Axes: row, word, quarter, half of the word, neighbour; in a row: word, half, quarter, …
    parts = gl.join(gl.join(p[0], p[1]), gl.join(p[2], p[3]))
    flat = gl.reshape(gl.permute(parts, [0, 1, 4, 2, 3]), [ROWS, 128])
    return gl.convert_layout(flat.to(DTYPE, bitcast=True), operand, assert_trivial=True)


@gluon.jit
def with_group(state, scale, words, x, UNITS: gl.constexpr):
    """Adds the product of one group to the sums; returns them and the scale of their units."""
    total, before = state
    ROWS: gl.constexpr = words.shape[0]
    words = words.load(word_layout(ROWS))
    if UNITS:
        # Where a group's scale is 0 nothing is added, and the sums stay in the units they are in.
        rows: gl.constexpr = gl.SliceLayout(1, word_layout(ROWS))
        nothing = gl.convert_layout(scale == 0.0, rows, assert_trivial=True)
        words = gl.where(nothing[:, None], _NOTHING, words)
        operand = unpacked(words, x.dtype, ROWS, x.shape[1])
        unit = gl.where(scale == 0.0, before, scale.to(gl.float32))
        total = total * (before / unit)[:, None]
        total = warpgroup_mma(operand, x, total, is_async=True)
        total, operand = warpgroup_mma_wait(0, deps=[total, operand])
        return total, unit
    operand = unpacked(words, x.dtype, ROWS, x.shape[1])
    sums = warpgroup_mma(operand, x, gl.zeros_like(total), is_async=True, use_acc=False)
    sums, operand = warpgroup_mma_wait(0, deps=[sums, operand])
    return total + sums * scale.to(gl.float32)[:, None], before


@gluon.jit
def store(y, total, first, M, N, ROWS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Rows of y are columns of the sums: through shared memory, so that 16 bytes go at once."""
    along: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    out = gl.convert_layout(total.to(y.dtype.element_ty), along)
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, along))[:, None]
    m = gl.program_id(1) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, along))[None, :]
    at = y + (gl.program_id(2).to(gl.int64) * M + m.to(gl.int64)) * N + n
    gl.store(at, out, mask=(n < N) & (m < M))


@gluon.jit
def consume(
    given, ME: gl.constexpr, GROUPS: gl.constexpr, EACH: gl.constexpr, UNITS: gl.constexpr,
    SETTLED: gl.constexpr,
):  # fmt: skip
    """Computes a part of the program's rows of the matrix: those of consumer `ME`."""
    scales, y, memory, M, N = given
    held, codes, full, empty = memory
    STAGES: gl.constexpr = full.shape[0]
    PACK: gl.constexpr = held.shape[0] // STAGES
    CONSUMERS: gl.constexpr = codes.shape[0] // STAGES
    BLOCK_M: gl.constexpr = held.shape[1]
    ROWS: gl.constexpr = codes.shape[1]
    layout: gl.constexpr = sums_layout(BLOCK_M)
    if not SETTLED:
        wait_for_the_kernel_before()
    first = (gl.program_id(0) * CONSUMERS + ME) * ROWS
    across: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.minimum(first + gl.arange(0, ROWS, layout=across), N - 1).to(gl.int64)
    at = scales + row * GROUPS + gl.program_id(2) * EACH
    one = gl.full([ROWS], 1.0, gl.float32, across)
    state = gl.zeros([ROWS, BLOCK_M], gl.float32, layout), one
    # Scales are loaded a step ahead.
    scale, other = gl.load(at), gl.load(at + min(1, EACH - 1))
    for step in range(EACH // PACK):
        slot = step % STAGES
        words = codes.index(slot * CONSUMERS + ME)
        after = at + gl.minimum((step + 1) * PACK, EACH - PACK)
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        of_this, of_next = scale, other
        scale = gl.load(after)
        x = held.index(slot * PACK).permute((1, 0))
        if PACK == 1:
            state = with_group(state, of_this, words, x, UNITS)
        else:
            other = gl.load(after + 1)
            state = with_group(state, of_this, words.slice(0, 8, dim=1), x, UNITS)
            x = held.index(slot * PACK + 1).permute((1, 0))
            state = with_group(state, of_next, words.slice(8, 8, dim=1), x, UNITS)
        mbarrier.arrive(empty.index(slot))
    total, unit = state
    store(y, total * (unit * _UNITS)[:, None], first, M, N, ROWS, BLOCK_M)


@gluon.jit
def copy_codes(planes, memory, step, EACH: gl.constexpr):
    """Announces the copies of one step, and starts that of the codes."""
    held, codes, full, _empty = memory
    STAGES: gl.constexpr = full.shape[0]
    PACK: gl.constexpr = held.shape[0] // STAGES
    CONSUMERS: gl.constexpr = codes.shape[0] // STAGES
    ROWS: gl.constexpr = codes.shape[1]
    slot = step % STAGES
    gate = full.index(slot)
    mbarrier.expect(gate, PACK * (held.shape[1] * 256 + CONSUMERS * ROWS * 32))
    first = gl.program_id(0) * CONSUMERS * ROWS
    word = (gl.program_id(2) * EACH + step * PACK) * 8
    for i in gl.static_range(CONSUMERS):
        tma_load(planes, [first + i * ROWS, word], gate, codes.index(slot * CONSUMERS + i))


@gluon.jit
def copy_x(x, memory, step, EACH: gl.constexpr):
    held, _codes, full, _empty = memory
    STAGES: gl.constexpr = full.shape[0]
    PACK: gl.constexpr = held.shape[0] // STAGES
    slot = step % STAGES
    begin = gl.program_id(1) * held.shape[1]
    column = (gl.program_id(2) * EACH + step * PACK) * 128
    for i in gl.static_range(PACK):
        tma_load(x, [begin, column + i * 128], full.index(slot), held.index(slot * PACK + i))


@gluon.jit
def produce(x, planes, memory, EACH: gl.constexpr, SETTLED: gl.constexpr):
    """Copies groups of x and of codes, as far ahead as shared memory has room."""
    held, _codes, full, empty = memory
    STAGES: gl.constexpr = full.shape[0]
    STEPS: gl.constexpr = EACH // (held.shape[0] // STAGES)
    FILLED: gl.constexpr = min(STAGES, STEPS)
    if not SETTLED:
        wait_for_the_kernel_before()
    for step in gl.static_range(FILLED):
        copy_codes(planes, memory, step, EACH)
    if SETTLED:
        wait_for_the_kernel_before()
    for step in gl.static_range(FILLED):
        copy_x(x, memory, step, EACH)
    for step in range(FILLED, STEPS):
        mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
        copy_codes(planes, memory, step, EACH)
        copy_x(x, memory, step, EACH)


@launched
@gluon.jit(do_not_specialize=["M"])
def registers_kernel(
    x, planes, scales, y, M, N,
    GROUPS: gl.constexpr, SPLIT: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PACK: gl.constexpr, REGISTERS: gl.constexpr,
    UNITS: gl.constexpr, SETTLED: gl.constexpr,
):  # fmt: skip
    """y (SPLIT, M, N); x (M, K) and planes (N, K/16) int32 by tiles, scales (N, K/128).

    SETTLED: no kernel that may still run writes the weights; they are asked for before x is there.
    """
    EACH: gl.constexpr = GROUPS // SPLIT
    held = gl.allocate_shared_memory(x.dtype, [STAGES * PACK, BLOCK_M, 128], x.layout)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, ROWS, 8 * PACK], planes.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    memory = held, codes, full, empty
    given = scales, y, memory, M, N
    ONE: gl.constexpr = 0
    TWO: gl.constexpr = 1
    THREE: gl.constexpr = 2
    FOUR: gl.constexpr = 3
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (given, ONE, GROUPS, EACH, UNITS, SETTLED)),
            (consume, (given, TWO, GROUPS, EACH, UNITS, SETTLED)),
            (produce, (x, planes, memory, EACH, SETTLED)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (given, ONE, GROUPS, EACH, UNITS, SETTLED)),
            (consume, (given, TWO, GROUPS, EACH, UNITS, SETTLED)),
            (consume, (given, THREE, GROUPS, EACH, UNITS, SETTLED)),
            (consume, (given, FOUR, GROUPS, EACH, UNITS, SETTLED)),
            (produce, (x, planes, memory, EACH, SETTLED)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip


def constants(how: Any, groups: int, settled: bool) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "GROUPS": groups,
        "SPLIT": how.split,
        "BLOCK_M": how.rows_of_x,
        "ROWS": how.rows,
        "CONSUMERS": how.consumers,
        "STAGES": how.stages,
        "PACK": how.pack,
        "REGISTERS": how.registers,
        "UNITS": how.in_units,
        "SETTLED": settled,
    }


def launch(x: Tensor, words: Tensor, scales: Tensor, y: Tensor, how: Any, settled: bool) -> None:
    (M, K), (N, groups) = x.shape, scales.shape
    bm, rows, width = how.rows_of_x, how.rows, groups * 8
    codes = codes_layout(rows, how.pack)
    tiles = TensorDescriptor(x, [M, K], [K, 1], [bm, 128], tile_layout(bm, TYPES[x.dtype]))
    planes = TensorDescriptor(words, [N, width], [width, 1], [rows, 8 * how.pack], codes)
    run: Any = registers_kernel[how.grid(M, N)]
    given = constants(how, groups, settled)
    run(tiles, planes, scales, y, M, N, **given, num_warps=4, launch_pdl=True)
