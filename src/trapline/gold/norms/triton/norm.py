"""Layer norm and RMS norm on a GPU: every element is read once and written once.

This file has both passes and launches forward; `backward` launches backward. Both choose
kernels and constants by the width of the rows. The kernels are in `kernels`; backward of wide rows
shares each row between programs where `hopper/cooperative_rows` supports it. Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import may_start_early, on_their_device
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.norms import reference
from trapline.gold.norms.triton.backward import Backward, backward, entry_for
from trapline.gold.norms.triton.kernels import (
    forward_kernel,
    held_forward_kernel,
    wide_forward_kernel,
)

WIDEST = 65536


class ForwardTile(NamedTuple):
    """Constants of `forward_kernel`: whole rows per program."""

    rows: int
    warps: int
    ahead: bool = False  # load weights before computing the statistics
    early: bool = False  # programmatic dependent launch, on Hopper GPUs


class Pieces(NamedTuple):
    """Constants for a wide row, which one program takes piece by piece."""

    size: int  # elements
    warps: int
    early: bool = False


#: Rows up to this width, for 2 and for 4 bytes an element: measured on an H200.
FORWARD = {
    2: {
        64: ForwardTile(16, 1),
        128: ForwardTile(8, 1),
        256: ForwardTile(4, 1),
        512: ForwardTile(2, 1),
        768: ForwardTile(2, 2, early=True),
        1024: ForwardTile(2, 4, early=True),
        2048: ForwardTile(1, 4, early=True),
        4096: ForwardTile(2, 8, early=True),
        6144: ForwardTile(1, 4),
    },
    4: {
        64: ForwardTile(16, 1),
        128: ForwardTile(8, 1),
        256: ForwardTile(4, 1),
        512: ForwardTile(2, 1),
        768: ForwardTile(2, 2, early=True),
        1024: ForwardTile(1, 4, early=True),
        2048: ForwardTile(1, 8, early=True),
        4096: ForwardTile(1, 8, ahead=True, early=True),
        8192: ForwardTile(1, 16, ahead=True, early=True),
    },
}
#: Wider rows are kept in registers piece by piece; still wider ones are read twice.
HELD = {
    2: {8192: Pieces(2048, 8, early=True), 16384: Pieces(2048, 4, early=True)},
    4: {16384: Pieces(4096, 16, early=True)},
}
WIDE = Pieces(8192, 16)


@on_their_device
def norm_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, total, mean and rstd; the arguments are those of `registry.forward_operator`."""
    if problem := supports(arguments[0]):
        raise problem
    answers = reference.forward_shapes(*arguments)
    forward(answers, *arguments[:6])
    return answers


@on_their_device
def norm_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db; the arguments are those of `registry.backward_operator`."""
    dy, dtotal, x, w, mean, rstd, eps, centred, biased = arguments
    if problem := supports(x):
        raise problem
    answers = reference.backward_shapes(*arguments)
    dx, dw, db = answers
    rows = rows_of(dy), None if dtotal is None else rows_of(dtotal), rows_of(x)
    given = Backward(*rows, dense(w), mean, rstd, dx, eps, centred, biased)
    backward(given, dw if w is not None else None, db if biased else None)
    return answers


def supports(x: Tensor) -> DTypeError | RangeError | None:
    """Why the kernels do not support x, or None."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return DTypeError(f"the kernels take float16, bfloat16 and float32, got {x.dtype}")
    if not 1 <= x.shape[-1] <= WIDEST:
        return RangeError(f"the kernels take rows of 1 to {WIDEST} elements, got {x.shape[-1]}")
    return None


def forward(answers: tuple[Tensor, Tensor, Tensor, Tensor], *arguments: Any) -> None:
    """Fills the results y, total, mean and rstd of the operator's arguments."""
    x, residual, w, b, eps, centred = arguments
    y, total, mean, rstd = answers
    flat, added = rows_of(x), None if residual is None else rows_of(residual)
    M, D = flat.shape
    if not M:
        return
    results = (y, *(None if one.numel() == 0 else one for one in (total, mean, rstd)))
    given = flat, added, dense(w), dense(b), *results
    strides = flat.stride(0), 0 if added is None else added.stride(0)
    tile = entry_for(FORWARD[x.element_size()], D)
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
    held = entry_for(HELD[x.element_size()], D)
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


def rows_of(x: Tensor) -> Tensor:
    """x as (rows, D) with contiguous rows: a view where possible."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def dense(w: Tensor | None) -> Tensor | None:
    """Contiguous weights."""
    return None if w is None else w.contiguous()
