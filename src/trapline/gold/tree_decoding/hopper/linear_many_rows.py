# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Large products of a pass over some dozens of lines, fetched by Hopper's copy engine.

Every program reads all lines of its part of K, through the cache, which gives little more than the
memory does: a program must have many weights to each line, and every processor one program. So a
gated product is cut into as many programs as there are processors, about, with a tile and a half of
gates each (with two, and fewer programs, where there are so many lines that reading them counts for
more); and where outputs are too few for that, K is cut between programs: each leaves a partial sum,
a plane, and `reduce_split_k_kernel` of the decoder's short step adds the planes to the stream.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.decoder.triton.step_linear import load_square_sums, prefetch_rows
from trapline.gold.device import LOG2_E


@triton.jit
def planes_kernel(
    x_boxes, w_boxes, w, planes, rows, N, K, each, w_row,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`each` of K of a product, into a plane (rows, N) of float32 of their own."""
    first, top = tl.program_id(0) * BLOCK_N, tl.program_id(2) * BLOCK_B
    begin = tl.program_id(1) * each
    n, b = first + tl.arange(0, BLOCK_N), top + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w + begin, n, N, K - begin, w_row, 64)
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for start in range(begin, tl.minimum(begin + each, K), BLOCK_K):
        weights = w_boxes.load([first, start])
        total = tl.dot(weights, tl.trans(x_boxes.load([top, start])), total)
    row = tl.program_id(1).to(tl.int64) * rows + b
    inside = (n < N)[:, None] & (b < rows)[None, :]
    tl.store(planes + row[None, :] * N + n[:, None], total, mask=inside)


@triton.jit
def store_gated(gate, up, factor, b, n, out, rows, N, out_row):
    """silu(gate) · up, both (BLOCK_B, BLOCK_N) and yet without the norm's factor."""
    gate *= factor
    inner = gate * (up * factor) / (1.0 + tl.exp2(-gate * LOG2_E))
    places = out + b.to(tl.int64)[:, None] * out_row + n[None, :]
    inside = (b < rows)[:, None] & (n < N)[None, :]
    tl.store(places, inner.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_large_kernel(
    x_boxes, w_boxes, half_boxes, w, squares, out,
    rows, N, K, count, w_row, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`gated_kernel` of the short step with a tile and a half of gates a program.

    Lines are the left operand here: half a tile of weights would be too few for one.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    first, top = tl.program_id(0) * (BLOCK_N + HALF), tl.program_id(1) * BLOCK_B
    second = first + BLOCK_N
    n, m = first + tl.arange(0, BLOCK_N), second + tl.arange(0, HALF)
    b = top + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w, n, N, K, w_row, 64)
        prefetch_rows(w, m, N, K, w_row, 64)
        prefetch_rows(w, N + n, 2 * N, K, w_row, 64)
        prefetch_rows(w, N + m, 2 * N, K, w_row, 64)
        gdc_wait()
        gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    gate = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    half_gate = tl.zeros([BLOCK_B, HALF], tl.float32)
    half_up = tl.zeros([BLOCK_B, HALF], tl.float32)
    for start in range(0, K, BLOCK_K):
        values = x_boxes.load([top, start])
        gate = tl.dot(values, tl.trans(w_boxes.load([first, start])), gate)
        up = tl.dot(values, tl.trans(w_boxes.load([N + first, start])), up)
        half_gate = tl.dot(values, tl.trans(half_boxes.load([second, start])), half_gate)
        half_up = tl.dot(values, tl.trans(half_boxes.load([N + second, start])), half_up)
    factor = tl.rsqrt(tl.sum(sums, 0) / K + eps)[:, None]
    store_gated(gate, up, factor, b, n, out, rows, N, out_row)
    store_gated(half_gate, half_up, factor, b, m, out, rows, N, out_row)


@triton.jit
def gated_whole_kernel(
    x_boxes, w_boxes, w, squares, out,
    rows, N, K, count, w_row, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The same with whole tiles of gates alone: these are the left operand again."""
    first, top = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_B
    n, b = first + tl.arange(0, BLOCK_N), top + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w, n, N, K, w_row, 64)
        prefetch_rows(w, N + n, 2 * N, K, w_row, 64)
        gdc_wait()
        gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    gate = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for start in range(0, K, BLOCK_K):
        values = tl.trans(x_boxes.load([top, start]))
        gate = tl.dot(w_boxes.load([first, start]), values, gate)
        up = tl.dot(w_boxes.load([N + first, start]), values, up)
    factor = tl.rsqrt(tl.sum(sums, 0) / K + eps)[:, None]
    store_gated(tl.trans(gate), tl.trans(up), factor, b, n, out, rows, N, out_row)
