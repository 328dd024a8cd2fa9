# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Normed products for many rows on Hopper, with both operands loaded by TMA.

Address arithmetic in threads would be a measurable part of products this short.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.decoder.triton.step_linear import load_square_sums, prefetch_rows, rms_factor
from trapline.gold.device import LOG2_E, launched


@launched
@triton.jit
def normed_linear_tma_kernel(
    x_boxes, w_boxes, w, squares, out,
    rows, N, K, count, w_row, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """`normed_linear_kernel` with TMA loads."""
    first, top = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_B
    n, b = first + tl.arange(0, BLOCK_N), top + tl.arange(0, BLOCK_B)
    prefetch_rows(w, n, N, K, w_row, AHEAD)
    gdc_wait()
    gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    total = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for start in range(0, K, BLOCK_K):
        weights = w_boxes.load([first, start])
        total = tl.dot(weights, tl.trans(x_boxes.load([top, start])), total)
    total *= rms_factor(sums, K, eps)
    inside = (n < N)[:, None] & (b < rows)[None, :]
    places = out + b.to(tl.int64)[None, :] * out_row + n[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def normed_swiglu_tma_kernel(
    x_boxes, w_boxes, squares, out,
    rows, N, K, count, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`normed_swiglu_kernel` with TMA loads.

    Rows of the batch are the left operand. Gate and up are then two products of the same shape that
    meet in the same thread, so nothing has to be transposed and split afterwards.
    """
    first, top = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_B
    n, b = first + tl.arange(0, BLOCK_N), top + tl.arange(0, BLOCK_B)
    gdc_wait()
    gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    gate = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        values = x_boxes.load([top, start])
        gate = tl.dot(values, tl.trans(w_boxes.load([first, start])), gate)
        up = tl.dot(values, tl.trans(w_boxes.load([N + first, start])), up)
    factor = tl.trans(rms_factor(sums, K, eps))
    gate, up = gate * factor, up * factor
    inner = gate * up / (1.0 + tl.exp2(-gate * LOG2_E))
    inside = (b < rows)[:, None] & (n < N)[None, :]
    places = out + b.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(places, inner.to(out.dtype.element_ty), mask=inside)
