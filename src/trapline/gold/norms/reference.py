"""Layer norm and RMS norm in torch, differentiable; saves x and at most two numbers per row.

RMS norm is layer norm without the mean, so one pair of operators serves both. Sums run in float32
for 16-bit inputs and in the input's own dtype otherwise. Backward uses the closed form
(docs/components/layer_norm.md), with g = dy · weight:

    layer norm: dx = rstd · (g − mean(g) − x_hat · mean(g · x_hat))
    RMS norm:   dx = rstd · (g − x_hat · mean(g · x_hat))
"""

from typing import Any

import torch
from torch import Tensor

from trapline.gold.no_double_backward import differentiated_once

#: An absent result (total without a residual, mean of an RMS norm, …) is a tensor without elements.
_SCHEMAS = {
    "forward": "(Tensor x, Tensor? residual, Tensor? w, Tensor? b, float eps, bool centred)"
    " -> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
    "backward": "(Tensor dy, Tensor? dtotal, Tensor x, Tensor? w, Tensor? mean, Tensor? rstd,"
    " float eps, bool centred, bool biased) -> (Tensor dx, Tensor dw, Tensor db)",
}
#: Namespace of the operators in this file; `triton/norm` registers the same two under another.
TORCH = "trapline_norms"


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool,
    save_statistics: bool = True,
    operators: str = TORCH,
) -> tuple[Tensor, Tensor]:
    """(y, total): y = norm(total) · weight + bias, total = x + residual if given."""
    function: Any = _Norm
    options = eps, centred, save_statistics, operators
    y, total = function.apply(x, residual, weight, bias, *options)
    return y, total


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, operators: str = TORCH
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of a layer norm, outside of autograd."""
    with torch.no_grad():
        backward = getattr(torch.ops, operators).backward
        dx, dw, db = backward(dy, None, x, weight, None, None, eps, True, True)
        return dx, dw, db


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        save_statistics: bool,
        operators: str,
    ) -> tuple[Tensor, Tensor]:
        forward = getattr(torch.ops, operators).forward
        y, total, mean, rstd = forward(x, residual, weight, bias, eps, centred)
        normed = x if residual is None else total
        mean = mean if save_statistics and centred else None
        ctx.save_for_backward(normed, weight, mean, rstd if save_statistics else None)
        ctx.added, ctx.options = residual is not None, (eps, centred, bias is not None)
        ctx.operators = operators
        ctx.set_materialize_grads(False)  # an unused total costs no tensor of zeros
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else dy
        operator = getattr(torch.ops, ctx.operators).backward
        through = dtotal if ctx.added else None
        saved = x, weight, mean, rstd
        dx, dw, db = differentiated_once("norm", operator, dy, through, *saved, *ctx.options)
        biased = ctx.options[-1]
        return (
            dx,
            dx if ctx.added else None,
            dw if weight is not None else None,
            db if biased else None,
            *(None,) * 4,
        )


def _forward(
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


def define(namespace: str) -> Any:
    """Defines both operators in a namespace; the caller registers implementations."""
    library: Any = torch.library  # its calls carry no types
    made = library.Library(namespace, "DEF")
    for name, schema in _SCHEMAS.items():
        made.define(name + schema)
    return made


# Composed of torch operators, so one implementation serves every device, and tracing too.
_LIBRARY = define(TORCH)
_LIBRARY.impl("forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward, "CompositeExplicitAutograd")
