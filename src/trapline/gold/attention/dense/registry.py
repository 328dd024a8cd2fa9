"""Attention as torch operators: what they are called, what they give, and their gradients.

The same four operators are registered once for each way to compute them, under a namespace of its
own: `fast` in torch, `kernels` on a GPU. Gradients come from q, k, v, out and lse in all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trapline.gold.no_double_backward import differentiated_once

_RULES = "bool causal, int window, float softcap, float scale"
_PACKED = "Tensor cu_q, Tensor cu_k, int max_q, int max_k"
_SAVED = "Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_REPEATS = "bool deterministic=True"
_SCHEMAS = {
    "forward": f"(Tensor q, Tensor k, Tensor v, {_RULES}) -> (Tensor, Tensor)",
    "backward": f"({_SAVED}, {_RULES}, {_REPEATS}) -> (Tensor, Tensor, Tensor)",
    "varlen_forward": f"(Tensor q, Tensor k, Tensor v, {_PACKED}, {_RULES}) -> (Tensor, Tensor)",
    "varlen_backward": f"({_SAVED}, {_PACKED}, {_RULES}, {_REPEATS}) -> (Tensor, Tensor, Tensor)",
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    operators: str,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """out (B,H,T,D) and lse (B,H,T), differentiable in q, k and v."""
    function: Any = _Attention
    rules = causal, window, softcap, scale
    out, lse = function.apply(operators, deterministic, q, k, v, *rules)
    return out, lse


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    operators: str,
    deterministic: bool = True,
) -> Tensor:
    """out (tokens, H, D) of packed sequences, differentiable in q, k and v."""
    function: Any = _Varlen
    numbers = cu_q, cu_k, max_q, max_k, causal, window, softcap, scale
    out: Tensor = function.apply(operators, deterministic, q, k, v, *numbers)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operators: str,
        deterministic: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rules: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse = getattr(torch.ops, operators).forward(q, k, v, *rules)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.operators, ctx.rules = operators, (*rules, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        operator = getattr(torch.ops, ctx.operators).backward
        saved = ctx.saved_tensors
        grads = differentiated_once("attention", operator, dout, dlse, *saved, *ctx.rules)
        return (None, None, *grads, None, None, None, None)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operators: str,
        deterministic: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        *numbers: float,
    ) -> Tensor:
        operator = getattr(torch.ops, operators).varlen_forward
        out, lse = operator(q, k, v, cu_q, cu_k, *numbers)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.operators, ctx.numbers = operators, (*numbers, deterministic)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        operator = getattr(torch.ops, ctx.operators).varlen_backward
        dlse = torch.zeros_like(saved[4])  # of lse
        grads = differentiated_once("attention", operator, dout, dlse, *saved, *ctx.numbers)
        return (None, None, *grads, *[None] * 8)


def a_group(heads: int, groups: int) -> int:
    """How many query heads share keys and values; none where there are no heads at all."""
    return heads // max(groups, 1)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is computed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _forward_shape(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty(q), q.new_empty(q.shape[:-1], dtype=computed_in(q.dtype))


def _varlen_forward_shape(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty(q), q.new_empty((q.shape[1], q.shape[0]), dtype=computed_in(q.dtype))


def _backward_shape(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, q, k, v = arguments[:5]
    return _empty(q), _empty(k), _empty(v)


def _empty(x: Tensor) -> Tensor:
    """Contiguous, whatever the strides of x."""
    return x.new_empty(x.shape)


_SHAPES = {
    "forward": _forward_shape,
    "backward": _backward_shape,
    "varlen_forward": _varlen_forward_shape,
    "varlen_backward": _backward_shape,
}


def register(
    namespace: str, functions: dict[str, Callable[..., tuple[Tensor, ...]]], device: str
) -> Any:
    """The four operators under a namespace, for one device and for tracing."""
    library: Any = torch.library  # its calls carry no types
    made = library.Library(namespace, "DEF")
    for name, function in functions.items():
        made.define(name + _SCHEMAS[name])
        made.impl(name, function, device)
        made.impl(name, _SHAPES[name], "Meta")
    return made
