# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""W2A16 for nine rows of x and more on a Hopper GPU: codes become 16-bit numbers once a tile.

A program has BLOCK_N rows of the matrix and BLOCK_M of x. Group by group it turns a tile of codes
into −¼, 0, ¼ by a few instructions for two of them (`ptx.unpack`), multiplies it on
the tensor cores (the matrix is their first operand: 64 rows of it, but as few as 16 of x) and adds
the sums up, times the group's scales. Words and activations are copied ahead to shared memory.

Where a matrix has few rows, several programs share the groups of a row (SPLIT), and a second kernel
adds up what they have. From 65 rows on `many_rows_wide` serves.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import launched, processors
from trapline.gold.ternary.hopper import ptx as text
from trapline.gold.ternary.hopper.many_rows_wide import launch_wide

_BF16 = tl.constexpr(text.unpack("bf16"))
_F16 = tl.constexpr(text.unpack("f16"))
_NEEDS = tl.constexpr(text.UNPACK_NEEDS)
_UNITS = tl.constexpr(text.CODE_UNITS)
#: Elements a program of `add_parts_kernel` adds up.
ADDED = 1024


@triton.jit
def _ordered(o):
    """(…, 2, 2, 2, 2) from 16 tensors, the last four axes counting them."""
    even = tl.join(tl.join(tl.join(o[0], o[8]), tl.join(o[4], o[12])),
                   tl.join(tl.join(o[2], o[10]), tl.join(o[6], o[14])))  # fmt: skip
    odd = tl.join(tl.join(tl.join(o[1], o[9]), tl.join(o[5], o[13])),
                  tl.join(tl.join(o[3], o[11]), tl.join(o[7], o[15])))  # fmt: skip
    return tl.join(even, odd)


@triton.jit
def _unpacked(words, BF16: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS, 128) 16-bit numbers from (ROWS, 8) words."""
    ASM: tl.constexpr = _BF16 if BF16 else _F16
    parts = tl.inline_asm_elementwise(
        ASM, _NEEDS, [words], dtype=(tl.int16,) * 16, is_pure=True, pack=1
    )
    bits = tl.reshape(_ordered(parts), [ROWS, 128])
    return bits.to(tl.bfloat16, bitcast=True) if BF16 else bits.to(tl.float16, bitcast=True)


@triton.jit
def _scaled(sums, scale):
    return sums * (scale.to(tl.float32) * _UNITS)[:, None]


@launched
@triton.jit(do_not_specialize=["M"])
def many_rows_kernel(
    x_ptr, words_ptr, scales_ptr, y_ptr, M, N,
    GROUPS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y (SPLIT, M, N); x (M, K), words (N, K/16), scales (N, K/128); GROUPS / SPLIT a program.

    PAIRS: two groups a step, if their number is even.
    """
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    EACH: tl.constexpr = GROUPS // SPLIT
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * EACH
    # Beyond the last row the last one is read again.
    there = tl.minimum(row, N - 1)
    word_at = words_ptr + there[:, None] * (GROUPS * 8) + tl.arange(0, 8)[None, :] + first * 8
    scale_at = scales_ptr + there * GROUPS + first
    x_at = x_ptr + tl.minimum(m, M - 1)[None, :] * (GROUPS * 128) + tl.arange(0, 128)[:, None]
    x_at += first * 128
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    gdc_wait()
    gdc_launch_dependents()
    scale = tl.load(scale_at)
    if PAIRS:
        other_scale = tl.load(scale_at + 1)
        for g in tl.range(0, EACH, 2, num_stages=STAGES):
            words, x = tl.load(word_at + g * 8), tl.load(x_at + g * 128)
            others, other_x = tl.load(word_at + g * 8 + 8), tl.load(x_at + g * 128 + 128)
            # Scales are loaded a step ahead: the compiler pipelines operands of products only.
            after = tl.minimum(g + 2, EACH - 2)
            later, other_later = tl.load(scale_at + after), tl.load(scale_at + after + 1)
            tile, other_tile = _unpacked(words, BF16, BLOCK_N), _unpacked(others, BF16, BLOCK_N)
            sums, other_sums = tl.dot(tile, x), tl.dot(other_tile, other_x)
            total += _scaled(sums, scale)
            total += _scaled(other_sums, other_scale)
            scale, other_scale = later, other_later
    else:
        for g in tl.range(0, EACH, num_stages=STAGES):
            words, x = tl.load(word_at + g * 8), tl.load(x_at + g * 128)
            later = tl.load(scale_at + tl.minimum(g + 1, EACH - 1))
            total += _scaled(tl.dot(_unpacked(words, BF16, BLOCK_N), x), scale)
            scale = later
    out = y_ptr + (tl.program_id(2).to(tl.int64) * M + m[None, :]) * N + row[:, None]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=(m < M)[None, :] & (row < N)[:, None])


@launched
@triton.jit(do_not_specialize=["size"])
def add_parts_kernel(parts_ptr, y_ptr, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """y (size) from parts (SPLIT, size) in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    gdc_wait()
    gdc_launch_dependents()
    total = tl.load(parts_ptr + at, mask=here, other=0.0)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(parts_ptr + i * size.to(tl.int64) + at, mask=here, other=0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=here)


class ManyRowsTiles(NamedTuple):
    """How a product is divided into programs."""

    rows_of_x: int
    rows: int
    warps: int
    stages: int
    #: Programs that share the groups of a row.
    split: int
    #: Two groups a step; 65 rows of x and more do without.
    pairs: bool = False

    @property
    def wide(self) -> bool:
        return self.rows_of_x > 64


def cut(M: int, N: int, groups: int, multiprocessors: int) -> ManyRowsTiles:
    """The fastest of some 170 variants on an H200."""
    if M > 128:
        programs = cdiv(N, 128) * cdiv(M, 256)
        return ManyRowsTiles(256, 128, 8, 2, _shared(groups, programs, multiprocessors))
    if M > 64:
        return ManyRowsTiles(128, 64, 4, 2, _shared(groups, cdiv(N, 64), 2 * multiprocessors))
    bm = max(16, triton.next_power_of_2(M))
    split = _shared(groups, cdiv(N, 64), 2 * multiprocessors)
    return ManyRowsTiles(bm, 64, 4, 4, split, bm <= 32 and groups // split % 2 == 0)


def _shared(groups: int, programs: int, room: int) -> int:
    """Number of parts that rows are divided into when the GPU has room for more programs."""
    if 2 * programs > room:
        return 1
    return max(part for part in range(1, min(groups, room // programs) + 1) if groups % part == 0)


def many_rows(
    x: Tensor,
    plane: Tensor,
    scales: Tensor,
    y: Tensor,
    *,
    settled: bool = False,
    how: ManyRowsTiles | None = None,
) -> None:
    """Fills y for 16-bit rows of x; contiguous, K in whole groups of 128; Hopper.

    `settled` as in `kernels.packed_matmul`; up to 64 rows it gains nothing.
    """
    (N, groups), M = scales.shape, x.shape[0]
    chosen = how or cut(M, N, groups, processors(x))
    bm, bn, warps, stages, split, pairs = chosen
    out = y if split == 1 else x.new_empty((split, M, N), dtype=torch.float32)
    words, grid = plane.view(torch.int32), (cdiv(N, bn), cdiv(M, bm), split)
    if chosen.wide:
        launch_wide(x, words, scales, out, grid, (bm, bn, warps, stages, split), settled)
    else:
        launch: Any = many_rows_kernel[grid]
        launch(
            x, words, scales, out, M, N, GROUPS=groups, SPLIT=split, BLOCK_M=bm, BLOCK_N=bn,
            PAIRS=pairs, STAGES=stages, num_warps=warps, num_stages=stages, launch_pdl=True,
        )  # fmt: skip
    if split > 1:
        add: Any = add_parts_kernel[(cdiv(M * N, ADDED),)]
        add(out, y, M * N, SPLIT=split, BLOCK=ADDED, num_warps=4, launch_pdl=True)
