# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Split-K products of a decoding step: weights are in shared memory before activations are ready.

With some dozens of rows a small product is limited by moving operands to the processors, tile after
tile, after the previous kernel is done. Here each program loads all of its weights before that. To
fit into shared memory, K is split between programs; each writes a partial sum (rows, N) in float32,
and a second kernel adds them up, always in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.tile_config import (
    REDUCE_BLOCK,
    SPLIT_K_BLOCK_K,
    SPLIT_K_BLOCK_N,
    rows_per_program,
    split_k_parts,
    uses_split_k,
)
from trapline.gold.device import launched


@launched
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


@launched
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


class SplitKLinear:
    """Partial sums of products of up to `rows` rows; `shapes` are (outputs, inputs)."""

    def __init__(
        self, like: Tensor, shapes: list[tuple[int, int]], rows: int, precision: str, *, early: bool
    ) -> None:
        self._size, self._precision, self._early = like.element_size(), precision, early
        # A shape that uses split K with fewer rows also does with more.
        most = [n * split_k_parts(k) for n, k in shapes if uses_split_k(rows, n, k, self._size)]
        self._planes = like.new_empty(max(most, default=0) * rows, dtype=torch.float32)

    def serves(self, w: Tensor, rows: int) -> bool:
        """Whether a product of this many rows uses split K."""
        outputs, inputs = w.shape
        return uses_split_k(rows, outputs, inputs, self._size)

    def add(
        self, x: Tensor, w: Tensor, stream: Tensor, weight: Tensor, y: Tensor, squares: Tensor,
        rows: int,
    ) -> int:  # fmt: skip
        """Adds x · wᵀ to the stream as `residual_linear_kernel` does; returns square sums a row."""
        outputs, inputs = w.shape
        planes, block_b = split_k_parts(inputs), rows_per_program(rows)
        split_k_kernel[(cdiv(outputs, SPLIT_K_BLOCK_N), planes, cdiv(rows, block_b))](
            *(x, w, self._planes, rows, outputs, inputs, x.stride(0), w.stride(0)),
            BLOCK_B=block_b,
            BLOCK_N=SPLIT_K_BLOCK_N,
            BLOCK_K=SPLIT_K_BLOCK_K,
            PRECISION=self._precision,
            PDL=self._early,
            num_warps=4,
            **_launch(early=self._early),
        )
        after = stream, weight, y, squares
        return reduce_split_k(self._planes, planes, *after, rows, early=self._early)


def reduce_split_k(
    planes: Tensor, count: int, stream: Tensor, weight: Tensor, y: Tensor, squares: Tensor,
    rows: int, *, early: bool,
) -> int:  # fmt: skip
    """Adds `count` partial sums to the stream; returns the number of square sums a row."""
    width = stream.shape[1]
    pieces = cdiv(width, REDUCE_BLOCK)
    reduce_split_k_kernel[(rows, pieces)](
        *(planes, stream, weight, y, squares, rows, width),
        COUNT=count,
        BLOCK=REDUCE_BLOCK,
        PDL=early,
        num_warps=1,
        **_launch(early=early),
    )
    return pieces


def _launch(*, early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}
