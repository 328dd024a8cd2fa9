"""Layer norm and RMS norm on a GPU: every element is read once and written once.

This file registers the operators; `kernels_forward` and `kernels_backward` choose kernels and
constants by the width of the rows. Short rows are held in registers (`kernels_rows`). Of wider
ones, forward holds pieces or looks at them again in the cache (`kernels_wide`); backward lets a
team of programs share each row (`kernels_team`, on Hopper GPUs) or takes two kernels
(`kernels_wide`).

Offsets are 64-bit.
"""

import torch
from torch import Tensor

from trapline.gold.device import on_their_device
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.norms import fast
from trapline.gold.norms.kernels_backward import Backward, backward
from trapline.gold.norms.kernels_forward import forward
from trapline.gold.norms.kernels_shapes import backward_shape, dense, forward_shape, rows_of

WIDEST = 65536
KERNELS = "trapline_norms_kernels"


@on_their_device
def _forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(x)
    answers = forward_shape(x, residual, w, b, eps, centred)
    forward(x, residual, w, b, eps, centred, answers)
    return answers


@on_their_device
def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    require(x)
    answers = backward_shape(dy, dtotal, x, w, mean, rstd, eps, centred, biased)
    dx, dw, db = answers
    rows = rows_of(dy), None if dtotal is None else rows_of(dtotal), rows_of(x)
    given = Backward(*rows, dense(w), mean, rstd, dx, eps, centred, biased)
    backward(given, dw if w is not None else None, db if biased else None)
    return answers


def require(x: Tensor) -> None:
    """What the kernels take."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {x.dtype}")
    if not 1 <= x.shape[-1] <= WIDEST:
        raise RangeError(f"the kernels take rows of 1 to {WIDEST} elements, not {x.shape[-1]}")


_LIBRARY = fast.define(KERNELS)
for _name, _kernel, _shape in (
    ("forward", _forward, forward_shape),
    ("backward", _backward, backward_shape),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _shape, "Meta")
