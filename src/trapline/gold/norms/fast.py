"""Layer norm and RMS norm in torch, differentiable, with the statistics as the only thing saved.

Sums run in float32 for 16-bit inputs and in the input's own dtype otherwise. Backward uses the
closed form (docs/components/layer_norm.md), with g = dy · weight:

    layer norm: dx = rstd · (g − mean(g) − x_hat · mean(g · x_hat))
    RMS norm:   dx = rstd · (g − x_hat · mean(g · x_hat))
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_library: Any = torch.library  # its calls carry no types
_LIB = _library.Library("trapline_norms", "DEF")
_LIB.define("layer_norm(Tensor x, Tensor w, Tensor b, float eps) -> (Tensor, Tensor, Tensor)")
_LIB.define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor w, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)"
)
_LIB.define("rms_norm(Tensor x, Tensor w, float eps) -> (Tensor, Tensor)")
_LIB.define("rms_norm_backward(Tensor dy, Tensor x, Tensor w, Tensor rstd) -> (Tensor, Tensor)")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(..., D) → (..., D), differentiable in x, weight and bias."""
    function: Any = _LayerNorm
    y: Tensor = function.apply(x, weight, bias, eps)
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., D) → (..., D), differentiable in x and weight."""
    function: Any = _RMSNorm
    y: Tensor = function.apply(x, weight, eps)
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.ops.trapline_norms.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grads = torch.ops.trapline_norms.layer_norm_backward(dy, *ctx.saved_tensors)
        return (*grads, None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = torch.ops.trapline_norms.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        grads = torch.ops.trapline_norms.rms_norm_backward(dy, *ctx.saved_tensors)
        return (*grads, None)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(x)
    mean = wide.mean(dim=-1, keepdim=True)
    # Centre before squaring: E[x²] − E[x]² loses its digits once the mean dwarfs the spread.
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = centred.mul_(rstd).mul_(_wide(w)).add_(_wide(b))
    return y.to(x.dtype, copy=False), mean, rstd


def _layer_norm_backward(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide_dy = _wide(dy)
    x_hat = (_wide(x) - mean) * rstd
    g = wide_dy * _wide(w)
    mean_g = g.mean(dim=-1, keepdim=True)
    mean_gx = (g * x_hat).mean(dim=-1, keepdim=True)
    dx = rstd * (g - mean_g - x_hat * mean_gx)
    return dx.to(x.dtype), _rows(wide_dy * x_hat).to(w.dtype), _rows(wide_dy).to(w.dtype)


def _rms_norm(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * rstd * _wide(w)).to(x.dtype), rstd


def _rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    x_hat = _wide(x) * rstd
    g = _wide(dy) * _wide(w)
    dx = rstd * (g - x_hat * (g * x_hat).mean(dim=-1, keepdim=True))
    return dx.to(x.dtype), _rows(_wide(dy) * x_hat).to(w.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(dim=0)


# Composed of torch operators, so one implementation serves every device, and tracing too.
for _name, _function in (
    ("layer_norm", _layer_norm),
    ("layer_norm_backward", _layer_norm_backward),
    ("rms_norm", _rms_norm),
    ("rms_norm_backward", _rms_norm_backward),
):
    _LIB.impl(_name, _function, "CompositeExplicitAutograd")
