"""Linear layers that split K between programs: launches of `triton.split_k_kernels`."""

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.tile_config import (
    REDUCE_BLOCK,
    SPLIT_K_BLOCK_K,
    SPLIT_K_BLOCK_N,
    rows_per_program,
    split_k_parts,
    uses_split_k,
)
from trapline.gold.decoder.triton.split_k_kernels import reduce_split_k_kernel, split_k_kernel


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
        planes = self._part(x, w, rows)
        after = stream, weight, y, squares
        return reduce_split_k(self._planes, planes, *after, rows, early=self._early)

    def _part(self, x: Tensor, w: Tensor, rows: int) -> int:
        """Computes the partial sums of a product; returns how many."""
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
        return planes


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
