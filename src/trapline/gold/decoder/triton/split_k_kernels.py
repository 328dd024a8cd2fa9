# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Split-K products of a decoding step: weights are in shared memory before activations are ready.

With some dozens of rows a small product is limited by moving operands to the processors, tile after
tile, after the previous kernel is done. Here each program loads all of its weights before that. To
fit into shared memory, K is split between programs; each writes a partial sum (rows, N) in float32,
and a second kernel adds them up, always in the same order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def split_k_kernel(
    x, w, planes, rows, N, K, x_row, w_row,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The partial sum of BLOCK_K inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    stored = (n < N)[:, None] & (k < K)[None, :]
    weights = tl.load(w + n.to(tl.int64)[:, None] * w_row + k[None, :], mask=stored, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    there = (b < rows)[:, None] & (k < K)[None, :]
    values = tl.load(x + b[:, None] * x_row + k[None, :], mask=there, other=0.0)
    total = tl.dot(weights, tl.trans(values), input_precision=PRECISION)
    row = tl.program_id(1).to(tl.int64) * rows + b
    inside = (n < N)[:, None] & (b < rows)[None, :]
    tl.store(planes + row[None, :] * N + n[:, None], total, mask=inside)


@triton.jit
def reduce_split_k_kernel(
    planes, stream, weight, y, squares, rows, N,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds partial sums to part of one row of the stream; writes the next product's input."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    gain = tl.load(weight + n, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = row * N + n
    before = tl.load(stream + at, mask=inside, other=0.0)
    total = tl.load(planes + at, mask=inside, other=0.0)
    for part in tl.static_range(1, COUNT):
        total += tl.load(planes + (part * rows + row) * N + n, mask=inside, other=0.0)
    after = (before.to(tl.float32) + total).to(stream.dtype.element_ty)
    tl.store(stream + at, after, mask=inside)
    wide = tl.where(inside, after.to(tl.float32), 0.0)
    tl.store(y + at, (wide * gain.to(tl.float32)).to(y.dtype.element_ty), mask=inside)
    tl.store(squares + tl.program_id(1) * rows + row, tl.sum(wide * wide, 0))
