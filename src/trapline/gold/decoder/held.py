"""Launches of `kernels_held`: products in planes, and what adds the planes to the stream."""

import torch
from torch import Tensor

from trapline.gold.decoder.cuts import HELD_K, HELD_N, SETTLED, is_held, planes_of, rows_of
from trapline.gold.decoder.kernels_held import part_kernel, settle_kernel


class Held:
    """Planes for products of up to `rows` rows; `shapes` are their outputs and inputs."""

    def __init__(
        self, like: Tensor, shapes: list[tuple[int, int]], rows: int, precision: str, *, early: bool
    ) -> None:
        self._size, self._precision, self._early = like.element_size(), precision, early
        # What holds its weights with fewer rows does so with more.
        most = [n * planes_of(k) for n, k in shapes if is_held(rows, n, k, self._size)]
        self._planes = like.new_empty(max(most, default=0) * rows, dtype=torch.float32)

    def serves(self, w: Tensor, rows: int) -> bool:
        """Whether a product of so many rows is for here."""
        outputs, inputs = w.shape
        return is_held(rows, outputs, inputs, self._size)

    def add(
        self, x: Tensor, w: Tensor, stream: Tensor, weight: Tensor, y: Tensor, squares: Tensor,
        rows: int,
    ) -> int:  # fmt: skip
        """Adds x · wᵀ to the stream, as `added_kernel` does; into how many squares a row is cut."""
        planes = self._part(x, w, rows)
        after = stream, weight, y, squares
        return settle(self._planes, planes, *after, rows, early=self._early)

    def _part(self, x: Tensor, w: Tensor, rows: int) -> int:
        """Into how many planes a product went."""
        outputs, inputs = w.shape
        planes, block_b = planes_of(inputs), rows_of(rows)
        part_kernel[(-(-outputs // HELD_N), planes, -(-rows // block_b))](
            *(x, w, self._planes, rows, outputs, inputs, x.stride(0), w.stride(0)),
            BLOCK_B=block_b,
            BLOCK_N=HELD_N,
            BLOCK_K=HELD_K,
            PRECISION=self._precision,
            PDL=self._early,
            num_warps=4,
            **_launch(early=self._early),
        )
        return planes


def settle(
    planes: Tensor, count: int, stream: Tensor, weight: Tensor, y: Tensor, squares: Tensor,
    rows: int, *, early: bool,
) -> int:  # fmt: skip
    """Adds `count` planes to the stream; into how many squares a row is cut."""
    width = stream.shape[1]
    pieces = -(-width // SETTLED)
    settle_kernel[(rows, pieces)](
        *(planes, stream, weight, y, squares, rows, width),
        COUNT=count,
        BLOCK=SETTLED,
        PDL=early,
        num_warps=1,
        **_launch(early=early),
    )
    return pieces


def _launch(*, early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}
