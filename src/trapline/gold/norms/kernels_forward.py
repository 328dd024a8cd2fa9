"""Forward on a GPU: which kernel takes rows of which width, and with what constants."""

from typing import NamedTuple

import triton
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import may_start_early
from trapline.gold.norms.kernels_rows import forward_kernel
from trapline.gold.norms.kernels_shapes import cut_for, dense, rows_of
from trapline.gold.norms.kernels_wide import held_forward_kernel, wide_forward_kernel


class Tile(NamedTuple):
    """Whole rows for one program."""

    rows: int
    warps: int
    ahead: bool = False  # weights come before the statistics
    early: bool = False  # the kernel comes before the one before it is done, on Hopper GPUs


class Pieces(NamedTuple):
    """A wide row for one program, piece by piece."""

    size: int  # elements
    warps: int
    early: bool = False


#: Rows up to this width, for 2 and for 4 bytes an element: measured on an H200.
FORWARD = {
    2: {
        64: Tile(16, 1),
        128: Tile(8, 1),
        256: Tile(4, 1),
        512: Tile(2, 1),
        768: Tile(2, 2, early=True),
        1024: Tile(2, 4, early=True),
        2048: Tile(1, 4, early=True),
        4096: Tile(2, 8, early=True),
        6144: Tile(1, 4),
    },
    4: {
        64: Tile(16, 1),
        128: Tile(8, 1),
        256: Tile(4, 1),
        512: Tile(2, 1),
        768: Tile(2, 2, early=True),
        1024: Tile(1, 4, early=True),
        2048: Tile(1, 8, early=True),
        4096: Tile(1, 8, ahead=True, early=True),
        8192: Tile(1, 16, ahead=True, early=True),
    },
}
#: Wider rows are held in registers piece by piece, and beyond that looked at again.
HELD = {
    2: {8192: Pieces(2048, 8, early=True), 16384: Pieces(2048, 4, early=True)},
    4: {16384: Pieces(4096, 16, early=True)},
}
WIDE = Pieces(8192, 16)


def forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
    answers: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fills the answers: y, total, mean, rstd."""
    y, total, mean, rstd = answers
    flat, added = rows_of(x), None if residual is None else rows_of(residual)
    M, D = flat.shape
    if not M:
        return
    given = (flat, added, dense(w), dense(b), y, None if added is None else total, mean, rstd)
    strides = flat.stride(0), 0 if added is None else added.stride(0)
    tile = cut_for(FORWARD[x.element_size()], D)
    if tile is not None:
        early = tile.early and may_start_early(x.device)
        forward_kernel[(cdiv(M, tile.rows),)](
            *(*given, M, *strides, eps),
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            ROWS=tile.rows,
            CENTRED=centred,
            AHEAD=tile.ahead,
            EARLY=early,
            launch_pdl=early,
            num_warps=tile.warps,
        )
        return
    held = cut_for(HELD[x.element_size()], D)
    kernel, cut = (wide_forward_kernel, WIDE) if held is None else (held_forward_kernel, held)
    early = cut.early and may_start_early(x.device)
    kernel[(M,)](
        *(*given, *strides, eps),
        D=D,
        CHUNK=cut.size,
        CENTRED=centred,
        EARLY=early,
        launch_pdl=early,
        num_warps=cut.warps,
    )
