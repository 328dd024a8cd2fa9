"""Backward passes that refuse to be differentiated again."""

from collections.abc import Callable
from typing import Any

import torch

from trapline.gold.errors import UnsupportedError


def differentiated_once(name: str, gradients: Callable[..., Any], *arguments: Any) -> Any:
    """gradients(*arguments) for the backward pass of `name`; second derivatives raise an error.

    torch's `once_differentiable` checks only the incoming gradient. Below a plain sum that requires
    no gradient, and the terms through saved tensors would silently be missing.
    """
    # torch itself refuses second derivatives of compiled code, where ours cannot be traced.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        function: Any = _Once
        return function.apply(name, gradients, *arguments)
    return gradients(*arguments)


def refuse_second_derivatives(name: str, output: torch.Tensor) -> None:
    """Makes second derivatives through the operation behind `output` raise an error."""

    def refusing(gradients: tuple[Any, ...], _: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        return _Once.apply(name, lambda *given: given, *gradients)  # type: ignore[no-untyped-call]

    assert output.grad_fn is not None
    output.grad_fn.register_hook(refusing)


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> Any:
        _, gradients, *arguments = given
        return gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"{ctx.name} can be differentiated once, not twice")
