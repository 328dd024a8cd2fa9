"""Layer norm and RMS norm on a GPU: every element is read once and written once.

This file registers the operators; `forward` and `backward` choose kernels and constants by the
width of the rows. Short rows are held in registers (`kernels_rows`). Of wider ones, forward holds
pieces or looks at them again in the cache (`kernels_wide`); backward lets a team of programs share
each row (`kernels_team`, on Hopper GPUs) or takes two kernels (`kernels_wide`).

Offsets are 64-bit.
"""

from typing import Any

import torch
from torch import Tensor

from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.norms import backward, fast, forward
from trapline.gold.norms.rows import dense, rows_of

WIDEST = 65536
KERNELS = "trapline_norms_kernels"


def _forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(x)
    answers = _forward_shape(x, residual, w, b, eps, centred)
    forward.forward(x, residual, w, b, eps, centred, answers)
    return answers


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
    answers = _backward_shape(dy, dtotal, x, w, mean, rstd, eps, centred, biased)
    dx, dw, db = answers
    rows = rows_of(dy), None if dtotal is None else rows_of(dtotal), rows_of(x)
    given = backward.Backward(*rows, dense(w), mean, rstd, dx, eps, centred, biased)
    backward.backward(given, dw if w is not None else None, db if biased else None)
    return answers


def require(x: Tensor) -> None:
    """What the kernels take."""
    if x.dtype not in backward.KINDS:
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {x.dtype}")
    if not 1 <= x.shape[-1] <= WIDEST:
        raise RangeError(f"the kernels take rows of 1 to {WIDEST} elements, not {x.shape[-1]}")


def _forward_shape(
    x: Tensor, residual: Tensor | None, _w: Any, _b: Any, _eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one_a_row = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(one_a_row if centred else 0, dtype=torch.float32),
        x.new_empty(one_a_row, dtype=torch.float32),
    )


def _backward_shape(
    _dy: Tensor,
    _dtotal: Any,
    x: Tensor,
    w: Tensor | None,
    _mean: Any,
    _rstd: Any,
    _eps: float,
    _centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(width if w is not None else 0),
        x.new_empty(width if biased else 0),
    )


_LIBRARY = fast.define(KERNELS)
for _name, _kernel, _shape in (
    ("forward", _forward, _forward_shape),
    ("backward", _backward, _backward_shape),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _shape, "Meta")
