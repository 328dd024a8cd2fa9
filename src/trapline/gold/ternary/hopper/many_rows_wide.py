# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The product of `many_rows` for 65 rows of x and more: tiles of 128 or 256 of them, in Gluon.

While the tensor cores are at the tile of one group, the codes of the next one become 16-bit numbers
in shared memory; x comes by the copy engine. There is one set of sums, in units of the scale of the
group at hand: from group to group they are multiplied by the ratio of the scales. A second set, to
be scaled and added, would not fit the registers at 256 rows of x.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trapline.gold.device import launched
from trapline.gold.gluon_compat import tma_load
from trapline.gold.ternary.hopper import ptx as text
from trapline.gold.ternary.hopper.few_rows import wait_for_the_kernel_before

_BF16 = gl.constexpr(text.unpack("bf16"))
_F16 = gl.constexpr(text.unpack("f16"))
_NEEDS = gl.constexpr(text.UNPACK_NEEDS)
_UNITS = gl.constexpr(text.CODE_UNITS)
#: A word of 16 codes of 0, each stored as 1.
_NOTHING = gl.constexpr(0x55555555)
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def tile_layout(rows: int, dtype: Any) -> Any:
    """How a group of some rows lies in shared memory: as copy engine and tensor cores agree."""
    return gl.NVMMASharedLayout.get_default_for([rows, 128], dtype)


@gluon.constexpr_function
def word_layout(warps):
    """(16 warps, 8 words of a group): a lane has four words of one row."""
    return gl.BlockedLayout([1, 4], [16, 2], [warps, 1], [1, 0])


@gluon.jit
def ordered(o):
    """(…, 2, 2, 2, 2) from 16 tensors, the last four axes counting them."""
    even = gl.join(gl.join(gl.join(o[0], o[8]), gl.join(o[4], o[12])),
                   gl.join(gl.join(o[2], o[10]), gl.join(o[6], o[14])))  # fmt: skip
    odd = gl.join(gl.join(gl.join(o[1], o[9]), gl.join(o[5], o[13])),
                  gl.join(gl.join(o[3], o[11]), gl.join(o[7], o[15])))  # fmt: skip
    return gl.join(even, odd)


@gluon.jit
def unpacked(words, scale, DTYPE: gl.constexpr, ROWS: gl.constexpr):
    """(ROWS, 128) numbers of DTYPE from (ROWS, 8) words; zeros in rows whose scale is 0."""
    ASM: gl.constexpr = _BF16 if DTYPE.is_bf16() else _F16
    words = gl.where((scale == 0.0)[:, None], _NOTHING, words)
    parts = gl.inline_asm_elementwise(
        ASM, _NEEDS, [words], dtype=(gl.int16,) * 16, is_pure=True, pack=1
    )
    return gl.reshape(ordered(parts), [ROWS, 128]).to(DTYPE, bitcast=True)


@gluon.jit
def load_group(
    planes, scales, first, group, last, N,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Words and scales of one group; beyond the last row or group that one again."""
    wide: gl.constexpr = word_layout(WARPS)
    row = gl.minimum(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, wide)), N - 1)
    at = row.to(gl.int64) * GROUPS + gl.minimum(group, last)
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, wide))
    return gl.load(planes + at[:, None] * 8 + word[None, :]), gl.load(scales + at)


@gluon.jit
def fetch_x(held, full, x, slot, begin, group, here, BLOCK_M: gl.constexpr):
    """Starts the copy of one group of x, if there is one."""
    mbarrier.expect(full.index(slot), BLOCK_M * 256, pred=here)
    tma_load(x, [begin, group * 128], full.index(slot), held.index(slot), pred=here)


@gluon.jit
def known(scale, before):
    """The scale the sums are in: where a group's is 0 nothing is added, and any will do."""
    scale = scale.to(gl.float32)
    return gl.where(scale == 0.0, before, scale)


@gluon.jit
def store(
    y, total, first, begin, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of y are columns of the sums: through shared memory, so that 16 bytes go at once."""
    along: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    out = gl.convert_layout(total.to(y.dtype.element_ty), along)
    n = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, along))[:, None]
    m = begin + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, along))[None, :]
    at = y + (gl.program_id(2).to(gl.int64) * M + m.to(gl.int64)) * N + n
    gl.store(at, out, mask=(n < N) & (m < M))


@launched
@gluon.jit(do_not_specialize=["M"])
def wide_kernel(
    x, planes, scales, y, M, N,
    GROUPS: gl.constexpr, SPLIT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr, STAGES: gl.constexpr, SETTLED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """y (SPLIT, M, N); x (M, K) by tiles, planes (N, K/16) int32, scales (N, K/128).

    SETTLED: no kernel that may still run writes the weights; they are asked for before x is there.
    """
    EACH: gl.constexpr = GROUPS // SPLIT
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    first = gl.program_id(0) * BLOCK_N
    begin = gl.program_id(1) * BLOCK_M
    start = gl.program_id(2) * EACH
    last = start + EACH - 1
    held = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, 128], x.layout)
    tile_of: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 128], DTYPE)
    tile = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, 128], tile_of)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    if not SETTLED:
        wait_for_the_kernel_before()
    now, of_now = load_group(planes, scales, first, start, last, N, GROUPS, BLOCK_N, WARPS)
    second, of_second = load_group(
        planes, scales, first, start + 1, last, N, GROUPS, BLOCK_N, WARPS
    )
    third, of_third = load_group(planes, scales, first, start + 2, last, N, GROUPS, BLOCK_N, WARPS)
    fourth, of_fourth = load_group(
        planes, scales, first, start + 3, last, N, GROUPS, BLOCK_N, WARPS
    )
    row = gl.minimum(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, sums)), N - 1)
    factor = scales + row.to(gl.int64) * GROUPS + start
    scale = known(gl.load(factor), 1.0)
    later = gl.load(factor + min(1, EACH - 1))
    latest = gl.load(factor + min(2, EACH - 1))
    if SETTLED:
        wait_for_the_kernel_before()
    for i in gl.static_range(STAGES - 1):
        fetch_x(held, full, x, i, begin, start + i, i < EACH, BLOCK_M)
    tile.index(0).store(unpacked(now, of_now, DTYPE, BLOCK_N))
    fence_async_shared()
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, sums)
    for g in range(EACH):
        mbarrier.wait(full.index(g % STAGES), (g // STAGES) & 1)
        there = held.index(g % STAGES).permute((1, 0))
        total = warpgroup_mma(tile.index(g % 2), there, total, is_async=True)
        ahead = g + STAGES - 1
        fetch_x(held, full, x, ahead % STAGES, begin, start + ahead, ahead < EACH, BLOCK_M)
        tile.index((g + 1) % 2).store(unpacked(second, of_second, DTYPE, BLOCK_N))
        fence_async_shared()
        second, of_second = third, of_third
        third, of_third = fourth, of_fourth
        fourth, of_fourth = load_group(
            planes, scales, first, start + g + 4, last, N, GROUPS, BLOCK_N, WARPS
        )
        following = known(later, scale)
        ratio = scale / following
        scale = following
        later = latest
        latest = gl.load(factor + gl.minimum(g + 3, EACH - 1))
        total = warpgroup_mma_wait(0, deps=[total])
        total = total * ratio[:, None]
    store(y, total * (scale * _UNITS)[:, None], first, begin, M, N, BLOCK_M, BLOCK_N, WARPS)


def launch_wide(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    y: Tensor,
    grid: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    settled: bool,
) -> None:
    """`sizes`: rows of x and of the matrix a program, warps, stages, parts of a row."""
    bm, bn, warps, stages, split = sizes
    (M, K), (N, groups), dtype = x.shape, scales.shape, TYPES[x.dtype]
    tiles = TensorDescriptor(x, [M, K], [K, 1], [bm, 128], tile_layout(bm, dtype))
    launch: Any = wide_kernel[grid]
    launch(
        tiles, words, scales, y, M, N,
        GROUPS=groups, SPLIT=split, BLOCK_M=bm, BLOCK_N=bn, WARPS=warps, STAGES=stages,
        SETTLED=settled, DTYPE=dtype, num_warps=warps, launch_pdl=True,
    )  # fmt: skip
