"""Layer norm and RMS norm in torch, forward and backward.

RMS norm is layer norm without the mean, so one pair of functions serves both. Sums run in float32
for 16-bit inputs and in the input's own dtype otherwise. Backward uses the closed form
(docs/components/layer_norm.md), with g = dy · weight:

    layer norm: dx = rstd · (g − mean(g) − x_hat · mean(g · x_hat))
    RMS norm:   dx = rstd · (g − x_hat · mean(g · x_hat))
"""

from typing import Any

import torch
from torch import Tensor


def forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    wide = _wide(total)
    mean, rstd = _statistics(wide, eps, centred)
    y = (wide - mean) * rstd if centred else wide * rstd
    y = y if w is None else y.mul_(_wide(w))
    y = y if b is None else y.add_(_wide(b))
    absent = x.new_empty(0)
    return (
        y.to(x.dtype, copy=False),
        absent if residual is None else total,
        mean if centred else absent.clone(),
        rstd,
    )


def _statistics(wide: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    mean = wide.mean(dim=-1, keepdim=True) if centred else wide.new_zeros(())
    # Centre before squaring: E[x²] − E[x]² cancels when the mean is much larger than the spread.
    variance = (wide - mean).square().mean(dim=-1, keepdim=True)
    return mean, torch.rsqrt(variance + eps)


def backward(
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
    wide, wide_dy = _wide(x), _wide(dy)
    if rstd is None:
        found, rstd = _statistics(wide, eps, centred)
        mean = found if centred else None
    x_hat = wide * rstd if mean is None else (wide - mean) * rstd
    g = wide_dy if w is None else wide_dy * _wide(w)
    dx = g - x_hat * (g * x_hat).mean(dim=-1, keepdim=True)
    dx = rstd * (dx - g.mean(dim=-1, keepdim=True) if centred else dx)
    dx = dx if dtotal is None else dx + _wide(dtotal)
    dw = x.new_empty(0) if w is None else _rows(wide_dy * x_hat).to(w.dtype)
    db = _rows(wide_dy).to(x.dtype) if biased else x.new_empty(0)
    return dx.to(x.dtype), dw, db


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(dim=0)


def forward_shapes(
    x: Tensor, residual: Tensor | None, _w: Any, _b: Any, _eps: float, centred: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, total, mean, rstd; an absent result is a tensor without elements."""
    per_row = (*x.shape[:-1], 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(per_row if centred else 0, dtype=wide),
        x.new_empty(per_row, dtype=wide),
    )


def backward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw, db; an absent result is a tensor without elements."""
    x, w, biased = arguments[2], arguments[3], arguments[8]
    width = x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(width if w is not None else 0),
        x.new_empty(width if biased else 0),
    )
