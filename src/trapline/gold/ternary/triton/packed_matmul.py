# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""W2A16 in Triton: products that read four codes a byte and accumulate in float32.

On a Hopper GPU up to eight 16-bit rows of x (four, if the matrix is large) go to `hopper.few_rows`
and `few_rows_ring`, more than that to `hopper.many_rows`.

`gemv_kernel` serves few rows elsewhere, and widths that are not whole groups. A code needs one
logical and one multiply-add instruction: its two bits are left where they stand inside a byte and
become the mantissa of a float, ½ + code / f, with f = 256, 64, 16, 4 by place. What the ½ adds
depends on x alone and is taken off once a word; it costs 7 of float32's 24 bits, which 16-bit
activations do not have. `gemm_kernel` serves many rows elsewhere, every width and float32: it
unpacks a tile for the tensor cores.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import is_hopper, launched, may_start_early, on_their_device, processors
from trapline.gold.errors import DTypeError, UnsupportedError
from trapline.gold.fallback import first_that_compiles, gluon_is_tested

GROUP = 128
#: Rows of x the tensor-core kernel for few rows takes.
FEW_ROWS = 8
#: The same of matrices of at least so many weights, on Hopper: there the kernel for many rows is
#: faster with five (28 672 × 8 192, 8 rows: 42 instead of 51 µs).
FEW_ROWS_OF_LARGE, LARGE = 4, 1 << 27
#: Rows of x up to which weights are worth more than tensor cores.
GEMV_ROWS = 4
#: Rows of the matrix a program, words of 16 codes a step, warps.
GEMV_BLOCK = (16, 64, 2)
GEMM_BLOCK = (64, 64, 4)
#: The bits of 0.5. An argument, so that it sits in a register: a logical instruction has room for
#: one constant, and the mask is one already.
_HALF = 0x3F000000


@triton.jit
def _word_sums(
    words, x_ptr, places, inside, half,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_W): Σ (code − 1) · x over the 16 codes of each word.

    x comes as int64: the four activations of one byte in one load.
    """
    sums = tl.zeros((BLOCK_N, BLOCK_W), dtype=tl.float32)
    added = tl.zeros((BLOCK_W,), dtype=tl.float32)
    for byte in tl.static_range(4):
        four = tl.load(x_ptr + places * 4 + byte, mask=inside, other=0)
        # The byte moves to bits 16..23: sign and exponent above it, the rest of the mantissa below.
        moved = words << (16 - 8 * byte) if byte < 2 else words >> (8 * byte - 16)
        for place in tl.static_range(4):
            x = (four >> (16 * place)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            factor = 4 ** (4 - place)
            bits = (moved & (3 << (16 + 2 * place))) | half
            sums += bits.to(tl.float32, bitcast=True) * (x * factor)[None, :]
            added += x * (0.5 * factor + 1.0)
    return sums - added[None, :]


# Were the width known to divide by 16, four words would go to each thread, and x, loaded in another
# layout, would cross shared memory with a barrier for each of its 16 parts.
@launched
@triton.jit(do_not_specialize=["width", "half"])
def gemv_kernel(
    x_ptr, words_ptr, scales_ptr, y_ptr, N, width, groups, half,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """y (M, N); x (M, 4 width) int64, words (N, width) int32; a program takes BLOCK_N rows."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = rows < N
    at = rows[:, None].to(tl.int64)
    for m in tl.static_range(M):
        total = tl.zeros((BLOCK_N, BLOCK_W), dtype=tl.float32)
        for start in range(0, width, BLOCK_W):
            places = start + tl.arange(0, BLOCK_W)
            inside = places < width
            both = here[:, None] & inside[None, :]
            words = tl.load(words_ptr + at * width + places[None, :], mask=both, other=0)
            scale_at = at * groups + (places // 8)[None, :]
            scales = tl.load(scales_ptr + scale_at, mask=both, other=0.0).to(tl.float32)
            x_row = x_ptr + m * 4 * width
            dtype: tl.constexpr = y_ptr.dtype.element_ty
            sums = _word_sums(words, x_row, places, inside, half, dtype, BLOCK_N, BLOCK_W)
            total += sums * scales
        y = tl.sum(total, axis=1)
        tl.store(y_ptr + m * N + rows, y.to(y_ptr.dtype.element_ty), mask=here)


@launched
@triton.jit
def gemm_kernel(
    x_ptr, plane_ptr, scales_ptr, y_ptr, M, N, K, row_bytes, groups,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y (M, N) tile by tile; plane (N, row_bytes) bytes, one group of 128 columns a step."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_here, column_here = rows < M, columns < N
    x_rows, w_rows = rows[:, None].to(tl.int64) * K, columns[None, :].to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        byte = group * 32 + tl.arange(0, 32)
        stored = (byte[:, None] < row_bytes) & column_here[None, :]
        # Places beyond the row hold code 0, which is stored as 1 in each pair of bits.
        packed = tl.load(plane_ptr + w_rows * row_bytes + byte[:, None], mask=stored, other=85)
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for place in tl.static_range(4):
            taken = byte * 4 + place
            inside = row_here[:, None] & (taken < K)[None, :]
            x = tl.load(x_ptr + x_rows + taken[None, :], mask=inside, other=0.0)
            codes = ((packed >> (2 * place)) & 3).to(tl.int8) - 1
            part = tl.dot(x, codes.to(x.dtype), part, input_precision=PRECISION)
        scales = tl.load(
            scales_ptr + columns.to(tl.int64) * groups + group, mask=column_here, other=0.0
        )
        total += part * scales.to(tl.float32)[None, :]
    out = rows[:, None].to(tl.int64) * N + columns[None, :]
    kept = row_here[:, None] & column_here[None, :]
    tl.store(y_ptr + out, total.to(y_ptr.dtype.element_ty), mask=kept)


class FewRowsPlan(NamedTuple):
    """How programs divide a matrix for few rows of x."""

    warps: int
    #: Groups of 128 a warp and pass.
    each: int
    passes: int = 1
    #: Programs a multiprocessor that stay for several tiles; 0: a program for each tile.
    stay: int = 0
    registers: int | None = None
    #: Tiles in shared memory; 0: they come straight to registers.
    stages: int = 0


#: By groups a row and the rows of x the kernel makes room for: 1, 2, 4 or 8.
_WIDE = {
    (64, 1): FewRowsPlan(8, 8, stay=2, stages=2),
    (64, 2): FewRowsPlan(8, 8, stay=2, stages=3, registers=128),
    (64, 4): FewRowsPlan(8, 8, stay=1),
    (64, 8): FewRowsPlan(8, 8, stay=1),
    (128, 1): FewRowsPlan(16, 8, stay=1, stages=3),
    (128, 2): FewRowsPlan(16, 8, stay=1, stages=3),
}


def planned(groups: int, rows: int) -> FewRowsPlan:
    """The fastest plan on an H200 for this number of groups per row and rows of x."""
    room: int = triton.next_power_of_2(rows)
    if (groups, room) in _WIDE:
        return _WIDE[groups, room]
    # Four passes at most where that can be: more are too long a program for the registers.
    warps = next((one for one in (4, 8) if groups <= 36 * one), 16)
    passes = 1 if groups <= 8 * warps else cdiv(groups, 9 * warps)
    each = cdiv(groups, warps * passes)
    if passes > 1 or each > 5:
        return FewRowsPlan(warps, each, passes)
    if room == 1:
        return FewRowsPlan(warps, each, registers=72)  # seven programs a multiprocessor, not six
    return (
        FewRowsPlan(warps, each, stay=3, registers=168)
        if room <= 4
        else FewRowsPlan(warps, each, stay=2)
    )


def packed_matmul(
    x: Tensor,
    plane: Tensor,
    scales: Tensor,
    group_size: int = GROUP,
    *,
    settled: bool = False,
    plan: FewRowsPlan | None = None,
) -> Tensor:
    """x (M, K) times the transposed packed matrix: (M, N) in x's dtype.

    `settled` says that no kernel that may still run writes the plane or the scales: they are then
    read while the kernel before is at work. `plan` overrides how few rows are done.
    """
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise DTypeError(
            f"packed weights are multiplied with 16 or 32 bits on a GPU, not {x.dtype}"
        )
    if scales.dtype != torch.float16:
        raise DTypeError(f"the kernels read float16 scales, not {scales.dtype}")
    given = plane, scales
    scales = _by_groups_of_128(scales, x.shape[1], group_size)
    x, plane, scales = (_whole(tensor) for tensor in (x, plane, scales))
    settled = settled and plane is given[0] and scales is given[1]
    y = x.new_empty(len(x), len(plane))
    if y.numel():
        _launch(x, plane, scales, y, settled, plan)
    return y


@on_their_device
def _launch(
    x: Tensor, plane: Tensor, scales: Tensor, y: Tensor, settled: bool, plan: FewRowsPlan | None
) -> None:
    columns = x.shape[1]
    low = x.dtype != torch.float32 and columns > 0
    whole = low and columns % GROUP == 0
    given = x, plane, scales, y
    tiers = {"triton": partial(_gemm, *given, GEMM_BLOCK)}
    if low and len(x) <= GEMV_ROWS and columns % 16 == 0:
        tiers = {"triton": partial(gemv, *given, GEMV_BLOCK)}
    few = plan is not None or is_few(len(x), len(plane) * columns, x.device)
    if whole and (may_start_early if few else is_hopper)(x.device) and gluon_is_tested():
        by_hopper = partial(few_rows, plan=plan) if few else _many_rows
        tiers = {"hopper": partial(by_hopper, *given, settled=settled), **tiers}
    first_that_compiles("packed products", tiers)


def is_few(rows: int, weights: int, device: torch.device) -> bool:
    """Whether the kernel for few rows is the faster one."""
    if rows <= FEW_ROWS_OF_LARGE or rows > FEW_ROWS:
        return rows <= FEW_ROWS
    return weights < LARGE or not is_hopper(device)


def _many_rows(x: Tensor, plane: Tensor, scales: Tensor, y: Tensor, *, settled: bool) -> None:
    from trapline.gold.ternary.hopper.many_rows import many_rows

    many_rows(x, plane, scales, y, settled=settled)


def few_rows(
    x: Tensor,
    plane: Tensor,
    scales: Tensor,
    y: Tensor,
    *,
    settled: bool = False,
    plan: FewRowsPlan | None = None,
) -> None:
    """Fills y for up to eight 16-bit rows of x; contiguous, K in whole groups of 128; Hopper."""
    N, groups = scales.shape
    chosen = plan or planned(groups, len(x))
    tiles = cdiv(N, 16)
    blocks = min(tiles, chosen.stay * processors(x)) if chosen.stay else tiles
    same = {
        "GROUPS": groups, "M": triton.next_power_of_2(len(x)), "WARPS": chosen.warps,
        "SETTLED": settled, "num_warps": chosen.warps, "launch_pdl": True,
    }  # fmt: skip
    if chosen.registers:
        same["maxnreg"] = chosen.registers
    from trapline.gold.ternary.hopper.few_rows import few_rows_kernel
    from trapline.gold.ternary.hopper.few_rows_ring import ring_kernel

    launch: Any = (ring_kernel if chosen.stages else few_rows_kernel)[(blocks,)]
    if chosen.stages:
        words = plane.view(torch.int32)
        launch(x, words, scales, y, len(x), N, blocks, STAGES=chosen.stages, **same)
    else:
        stays = blocks < tiles
        rest = {"EACH": chosen.each, "PASSES": chosen.passes, "STAYS": stays}
        launch(x, plane, scales, y, len(x), N, blocks, **rest, **same)


def gemv(x: Tensor, plane: Tensor, scales: Tensor, y: Tensor, block: tuple[int, int, int]) -> None:
    """Fills y for a few 16-bit rows of x; contiguous, K a multiple of 16, groups of 128."""
    N, width = len(plane), x.shape[1] // 16
    rows, words, warps = block
    launch: Any = gemv_kernel[(cdiv(N, rows),)]
    launch(
        x.view(torch.int64), plane.view(torch.int32), scales, y, N, width, scales.shape[1], _HALF,
        M=len(x), BLOCK_N=rows, BLOCK_W=words, num_warps=warps,
    )  # fmt: skip


def _gemm(x: Tensor, plane: Tensor, scales: Tensor, y: Tensor, block: tuple[int, int, int]) -> None:
    (M, K), N = x.shape, len(plane)
    columns, rows, warps = block
    rows = max(16, min(rows, triton.next_power_of_2(M)))
    grid = (cdiv(M, rows), cdiv(N, columns))
    launch: Any = gemm_kernel[grid]
    launch(
        x, plane, scales, y, M, N, K, plane.shape[1], scales.shape[1],
        BLOCK_M=rows, BLOCK_N=columns, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
    )  # fmt: skip


def _whole(tensor: Tensor) -> Tensor:
    """The same without gaps, from an address on that 16 bytes can be loaded from at once."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _by_groups_of_128(scales: Tensor, columns: int, group_size: int) -> Tensor:
    if group_size == GROUP:
        return scales
    if group_size % GROUP:
        raise UnsupportedError(
            f"the kernels read groups that are multiples of 128, not {group_size}"
        )
    return scales.repeat_interleave(group_size // GROUP, dim=1)[:, : cdiv(columns, GROUP)]
