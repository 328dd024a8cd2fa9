"""A transformer layer for a few rows: q, k, v and gate, up joined into one product each.

The decoding step in torch (`decode_step`) and large passes over trees (`tree_decoding.tree_pass`)
run this layer; the fused kernels (`fused_step`) read its weights. A residual is added together with
the norm after it, which halves the passes over memory.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.decoder import step_ops
from trapline.gold.decoder.cpu import compiled_ops
from trapline.gold.decoder.cpu.linear_few_rows import linear
from trapline.gold.decoder.experts import Experts
from trapline.gold.decoder.layers import Norm, tensor
from trapline.gold.norms.api import rms_norm


class LayerWeights(NamedTuple):
    """What the kernels of a layer read."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


class JoinedLayer:
    """A `Layer`, or a drafter's layer, which is its own `attention`."""

    def __init__(self, layer: Any) -> None:
        attention, feedforward = getattr(layer, "attention", layer), layer.feedforward
        self.norms: tuple[Norm, Norm] = layer.attention_norm, layer.feedforward_norm
        heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (None if norm is None else norm.scale.detach() for norm in heads)
        names = ("attention_post_norm", "feedforward_post_norm")
        self.post_norms: list[Norm | None] = [getattr(layer, name, None) for name in names]
        self.window: int | None = getattr(attention, "window", None)
        self.qkv = _Joined([attention.q, attention.k, attention.v])
        self.out = attention.out
        self.feedforward: _JoinedFeedforward | Experts = (
            feedforward if isinstance(feedforward, Experts) else _JoinedFeedforward(feedforward)
        )

    def __call__(
        self, x: Tensor, delta: Tensor | None, attend: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream and the term that is still to be added to it.

        `attend` maps queries, keys and values (rows, (H + 2G) · D) and the stream to (rows, H · D).
        """
        h, x = add_norm(self.norms[0], delta, x)
        mixed = apply_linear(self.out, attend(self.qkv(h), x))
        h, x = add_norm(self.norms[1], self._post(0, mixed), x)
        return x, self._post(1, self.feedforward(h))

    def _post(self, which: int, term: Tensor) -> Tensor:
        """The norm of a term before it is added, where the layer has one."""
        norm = self.post_norms[which]
        return term if norm is None else tensor(norm(term))

    def weights(self) -> LayerWeights:
        """For kernels; only of layers that `fused_step.suits` accepts."""
        assert isinstance(self.feedforward, _JoinedFeedforward)
        up, down = self.feedforward.up.weight, self.feedforward.down.weight
        assert self.qkv.weight is not None
        assert up is not None
        return LayerWeights(
            *(self.qkv.weight, self.out.weight, up, tensor(down)),
            (self.norms[0].weight, self.norms[1].weight),
            *(self.q_norm, self.k_norm, self.window),
        )


class _JoinedFeedforward:
    """A `Feedforward` with one product for gate and up."""

    def __init__(self, feedforward: Any) -> None:
        self.down, self.gelu = feedforward.down, feedforward.gelu
        self.gated = feedforward.gate is not None
        self.up = _Joined([feedforward.gate, feedforward.up] if self.gated else [feedforward.up])

    def __call__(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if not self.gated:
            inner = functional.gelu(up, approximate="tanh")
        elif self.gelu:
            gate, up = up.chunk(2, dim=-1)
            inner = functional.gelu(gate, approximate="tanh") * up
        else:
            inner = step_ops.swiglu(up)
        return apply_linear(self.down, inner)


class _Joined:
    """Linear layers with one input as one product; quantised ones one by one."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = list(parts)
        self.weight: Tensor | None = None
        self._bias: Tensor | None = None
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) == len(self._parts):
            self.weight = join_weights(*linears)
            if linears[0].bias is not None:
                self._bias = torch.cat([linear.bias.detach() for linear in linears])

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return linear(x, self.weight, self._bias)
        return torch.cat([part(x) for part in self._parts], dim=-1)


def join_weights(*parts: Any) -> Tensor:
    """Concatenates weights; the parts become views of the result, so none is stored twice."""
    weights = [tensor(part.weight).detach() for part in parts]
    first, sizes = weights[0], [len(weight) for weight in weights]
    adjacent = all(weight.is_contiguous() for weight in weights) and all(
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
        for one, other in pairwise(weights)
    )
    if adjacent:  # joined by an earlier call
        return first.as_strided((sum(sizes), first.shape[1]), first.stride())
    whole = torch.cat(weights)
    for part, piece in zip(parts, torch.split(whole, sizes), strict=True):
        part.weight.data = piece
    return whole


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer, by the product for a few rows if it is a plain one."""
    if type(layer) is nn.Linear:
        return linear(x, layer.weight, layer.bias)
    return tensor(layer(x))


def add_norm(norm: Norm, delta: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of x + delta, x + delta)."""
    if delta is None:
        return tensor(norm(x)), x
    if norm.bias is not None:
        x = x + delta
        return tensor(norm(x)), x
    scale = norm.scale
    if x.is_cuda:
        normed = rms_norm(delta, scale, norm.eps, residual=x)
        return tensor(normed.y), tensor(normed.residual)
    if compiled_ops.suits(x, delta, scale):
        return compiled_ops.add_norm(x, delta, scale, norm.eps)
    x = x + delta
    return tensor(norm(x)), x
