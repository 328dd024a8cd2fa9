"""Gradients that can be computed, and not differentiated again."""

from collections.abc import Callable
from typing import Any

import torch

from trapline.gold.errors import UnsupportedError


def differentiated_once(name: str, gradients: Callable[..., Any], *arguments: Any) -> Any:
    """gradients(*arguments), for the backward pass of `name`; their own gradients are refused.

    torch's `once_differentiable` looks at what comes in from above alone. Below a plain sum that
    has no gradient, and the terms through what the forward pass saved would silently be left out.
    """
    # A compiled backward pass has torch's own refusal, and cannot hold ours.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        function: Any = _Once
        return function.apply(name, gradients, *arguments)
    return gradients(*arguments)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, gradients: Callable[..., Any], *arguments: Any) -> Any:
        ctx.name = name
        return gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"{ctx.name} can be differentiated once, not twice")
