"""From norm arguments to the functions that compute them: operators and gradients.

`norm` is differentiable and saves x and at most two numbers per row; it calls `forward_operator`
and `backward_operator`, which run the torch reference or the kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trapline.gold.errors import UnsupportedError
from trapline.gold.fallback import first_that_compiles
from trapline.gold.impl import Impl
from trapline.gold.no_double_backward import differentiated_once
from trapline.gold.norms import reference
from trapline.gold.operators import applied, operator, recorded, transformed
from trapline.gold.replay import replayed

_Kernels = Callable[..., tuple[Tensor, ...]]
_Tiers = dict[str, Callable[[], tuple[Tensor, ...]]]


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    impl: Impl,
    *,
    centred: bool,
    save_statistics: bool = True,
) -> tuple[Tensor, Tensor]:
    """(y, total): y = norm(total) · weight + bias, total = x + residual if given."""
    tensors = x, residual, weight, bias
    is_recorded = recorded(*tensors)
    recomputed = is_recorded and centred and not save_statistics
    if impl == "torch" and not recomputed and not transformed():
        by_torch = reference.torch_norm(*tensors, eps, centred, is_recorded)
        if by_torch is not None:
            return by_torch
    if is_recorded:
        y, total, _, _ = applied(_Norm, *tensors, eps, centred, save_statistics, impl)
    else:
        y, total, _, _ = _forward(*tensors, eps, centred, impl, False)
    return y, total


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, impl: Impl
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of a layer norm, outside of autograd."""
    with torch.no_grad():
        dx, dw, db = _backward(dy, None, x, weight, None, None, eps, True, True, impl)
        return dx, dw, db


class _Norm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        x, residual, weight, bias, eps, centred, _, impl = arguments
        return _forward(x, residual, weight, bias, eps, centred, impl)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, weight, bias, eps, centred, save_statistics, impl = inputs
        _, total, mean, rstd = output
        normed = x if residual is None else total
        kept_mean = mean if save_statistics and centred else None
        ctx.save_for_backward(normed, weight, kept_mean, rstd if save_statistics else None)
        ctx.mark_non_differentiable(*output[2:])
        ctx.added, ctx.biased = residual is not None, bias is not None
        ctx.options = eps, centred, ctx.biased, impl
        ctx.set_materialize_grads(False)  # an unused total costs no tensor of zeros

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else dy
        given = dy, dtotal if ctx.added else None, x, weight, mean, rstd
        dx, dw, db = differentiated_once("norm", _backward, *given, *ctx.options)
        dw, db = dw if weight is not None else None, db if ctx.biased else None
        return (dx, dx if ctx.added else None, dw, db, *(None,) * 4)


@replayed
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    if arguments[6] == "torch" and not transformed():
        return reference.forward(*arguments[:6])
    return forward_operator(*arguments)  # type: ignore[no-any-return]


@replayed
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    *given, impl = arguments
    if impl == "torch" and not transformed():
        return reference.backward(*given)
    return tuple(backward_operator(*arguments))


@operator(
    "trapline_norms",
    "forward(Tensor x, Tensor? residual, Tensor? w, Tensor? b, float eps, bool centred, str impl,"
    " bool statistics=True) -> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
    reference.forward_shapes,
)
def forward_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """y, total, mean and rstd; the last two are empty if `statistics` is False."""
    if arguments[6] == "torch":
        return _by_reference(*arguments)
    run = _kernels(arguments[0])[0]
    tiers: _Tiers = {
        "triton": partial(run, *arguments),
        "torch": partial(_by_reference, *arguments),
    }
    return first_that_compiles("norms", tiers)


def _by_reference(*arguments: Any) -> tuple[Tensor, ...]:
    """The arguments are those of `forward_operator`."""
    y, total, mean, rstd = reference.forward(*arguments[:6])
    if len(arguments) > 7 and not arguments[7]:
        mean, rstd = mean.new_empty(0), rstd.new_empty(0)
    return y, total, mean, rstd


@operator(
    "trapline_norms",
    "backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor? w, Tensor? mean, Tensor? rstd,"
    " float eps, bool centred, bool biased, str impl) -> (Tensor dx, Tensor dw, Tensor db)",
    reference.backward_shapes,
)
def backward_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """dx, dw and db; the last argument is the implementation."""
    *given, impl = arguments
    if impl == "torch":
        return reference.backward(*given)
    run = _kernels(given[0])[1]
    tiers: _Tiers = {
        "triton": partial(run, *given),
        "torch": partial(reference.backward, *given),
    }
    return first_that_compiles("norms' gradients", tiers)


def _kernels(x: Tensor) -> tuple[_Kernels, _Kernels]:
    """Forward and backward by kernels. Triton is imported on the first call."""
    if not x.is_cuda:
        raise UnsupportedError(
            f"impl='kernels' needs CUDA tensors, got tensors on {x.device}; use impl='torch'"
        )
    from trapline.gold.norms.triton import norm as kernels

    return kernels.norm_forward, kernels.norm_backward
