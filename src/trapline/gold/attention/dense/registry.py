"""From an attention problem to the function that computes it: operators, gradients, tiers.

`attention` is differentiable; it calls `forward_operator` and `backward_operator`, which run
the torch reference or a tier of kernels. The `supports(problem)` of a tier is None, or the reason
why the tier cannot compute the problem. impl="kernels" runs the first tier that supports the
problem and is faster there, or the next one if it does not compile; "triton" and "hopper" run that
tier or raise an error.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trapline.gold.attention.dense import Problem, compute_dtype, reference
from trapline.gold.errors import DTypeError, RangeError, UnsupportedError
from trapline.gold.fallback import first_that_compiles, gluon_is_tested, untested_release
from trapline.gold.no_double_backward import differentiated_once, refuse_second_derivatives
from trapline.gold.operators import applied, operator, recorded, transformed
from trapline.gold.replay import replayed

_PROBLEM = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, int max_q, int max_k, "
    "bool causal, int window, float softcap, float scale, bool deterministic"
)
_SAVED = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"
_WIDE = (torch.float32, torch.float64)


class Attention(torch.autograd.Function):
    """apply(*problem, impl): out like q, and lse (B,H,T) or (H, tokens), differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.options = inputs[5:]
        ctx.set_materialize_grads(False)  # an unused lse has no gradient

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        arguments = dout, dlse, out, lse, *tensors, *ctx.options
        grads = differentiated_once("attention", gradients, *arguments)
        return (*grads, *[None] * 10)


def attention(problem: Problem, impl: str, *, with_lse: bool = True) -> tuple[Tensor, ...]:
    """out, differentiable, and lse, which is differentiable only `with_lse`."""
    in_torch = impl == "torch" and not transformed()
    if not recorded(problem.q, problem.k, problem.v):
        if in_torch:
            return _by_reference(reference.forward, problem)
        return forward_operator(*problem, impl)  # type: ignore[no-any-return]
    if in_torch and not with_lse and reference.torch_differentiates(problem):
        out, lse = _by_reference(reference.forward, problem)
        refuse_second_derivatives("attention", out)
        return out, lse
    found: tuple[Tensor, ...] = applied(Attention, *problem, impl)
    return found


def attention_by_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor | None:
    """out by torch's kernel for CPUs if it serves at first sight: three plain tensors of one shape.

    Without a `Problem`, checks and tiers, which would take a tenth of the time of 128 tokens.
    """
    shape, dtype, is_recorded = q.shape, q.dtype, recorded(q, k, v)
    wide = compute_dtype(dtype)
    if len(shape) != 4 or shape != k.shape or shape != v.shape or not q.numel():
        return None
    if not dtype == k.dtype == v.dtype or wide not in _WIDE or not (k.is_cpu and v.is_cpu):
        return None
    if (is_recorded and dtype != wide) or transformed() or torch.is_autocast_enabled("cpu"):
        return None
    scale = shape[3] ** -0.5
    out, _ = reference.cpu_kernel_forward(q, k, v, causal and shape[2] > 1, scale)
    if is_recorded:
        refuse_second_derivatives("attention", out)
    return out


@replayed
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """`forward_operator`, or its body where torch need not see an operator."""
    if arguments[-1] == "torch" and not transformed():
        return _by_reference(reference.forward, Problem(*arguments[:-1]))
    return forward_operator(*arguments)  # type: ignore[no-any-return]


@replayed
def gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """`backward_operator`, or its body where torch need not see an operator."""
    dout, dlse, out, lse, *fields, impl = arguments
    if impl == "torch" and not transformed():
        return _by_reference(reference.backward, Problem(*fields), out, lse, dout, dlse)
    return backward_operator(*arguments)  # type: ignore[no-any-return]


def _forward_shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*arguments[:-1])
    q = problem.q
    lse = q.new_empty(problem.lse_shape, dtype=compute_dtype(q.dtype))
    return q.new_empty(q.shape), lse  # contiguous, even if q is not


def _backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arguments[4:7])


@operator(
    "trapline_attention", f"forward({_PROBLEM}, str impl) -> (Tensor, Tensor)", _forward_shapes
)
def forward_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """out and lse of a problem: the arguments are its fields and the implementation."""
    *fields, impl = arguments
    problem = Problem(*fields)
    if impl == "torch":
        return _contiguous(_by_reference(reference.forward, problem))
    tiers = forward_tiers()
    return _by_kernels("attention", problem, impl, tiers, (), reference.forward)


@operator(
    "trapline_attention",
    f"backward({_SAVED}, {_PROBLEM}, str impl) -> (Tensor, Tensor, Tensor)",
    _backward_shapes,
)
def backward_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv: the arguments are dout, dlse, out, lse, a problem and the implementation."""
    dout, dlse, out, lse, *fields, impl = arguments
    if impl == "torch":
        found = _by_reference(reference.backward, Problem(*fields), out, lse, dout, dlse)
        return _contiguous(found)
    problem = Problem(*fields)
    saved, tiers = (out, lse, dout, dlse), backward_tiers()
    return _by_kernels("attention's gradient", problem, impl, tiers, saved, reference.backward)


def _contiguous(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of an operator have the strides that its shapes promise."""
    return tuple(x.contiguous() for x in results)


def _by_kernels(
    operation: str,
    problem: Problem,
    impl: str,
    tiers: dict[str, "Tier"],
    saved: tuple[Tensor | None, ...],
    in_torch: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """The answer of a tier; with impl="kernels" the next one serves if it does not compile."""
    with _on_its_device(problem):
        name, tier = tier_for(problem, impl, tiers)
        if impl != "kernels":
            return tier.run(problem, *saved)
        chain = {name: tier, "triton": tiers["triton"]}
        runs = {name: partial(tier.run, problem, *saved) for name, tier in chain.items()}
        runs["torch"] = partial(_by_reference, in_torch, problem, *saved)
        return first_that_compiles(operation, runs)


def _by_reference(
    run: Callable[..., tuple[Tensor, ...]], problem: Problem, *saved: Tensor | None
) -> tuple[Tensor, ...]:
    """Without autocast, which would round the reference's matrix products to 16 bits."""
    kind = problem.q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return run(problem, *saved)
    with torch.autocast(kind, enabled=False):
        return run(problem, *saved)


def _on_its_device(problem: Problem) -> Any:
    """Kernels are launched on the current device, which may be another one."""
    if not problem.q.is_cuda:
        return nullcontext()
    return torch.cuda.device_of(problem.q)  # type: ignore[no-untyped-call]


class Tier(NamedTuple):
    """One implementation of a pass by kernels."""

    run: Callable[..., tuple[Tensor, ...]]
    #: None, or the reason why it cannot compute the problem.
    supports: Callable[[Problem], str | None]
    #: Whether it is the fastest tier for a problem that it supports, by measurement.
    is_faster: Callable[[Problem], bool]


@cache
def forward_tiers() -> dict[str, Tier]:
    """Tiers of the forward pass, fastest first. Triton is imported on the first call."""
    from trapline.gold.attention.dense.triton import forward as triton_forward
    from trapline.gold.attention.dense.triton import tiles as triton

    tiers = {"triton": Tier(triton_forward.forward, triton.supports, lambda _: True)}
    if not gluon_is_tested():
        return tiers
    from trapline.gold.attention.dense.hopper import forward as hopper_forward
    from trapline.gold.attention.dense.hopper import tiles as hopper

    return {
        "hopper": Tier(hopper_forward.forward, hopper.supports, hopper_forward.is_faster),
        **tiers,
    }


@cache
def backward_tiers() -> dict[str, Tier]:
    """Tiers of the backward pass, fastest first."""
    from trapline.gold.attention.dense.triton import backward as triton_backward
    from trapline.gold.attention.dense.triton import tiles as triton

    tiers = {"triton": Tier(triton_backward.backward, triton.supports, lambda _: True)}
    if not gluon_is_tested():
        return tiers
    from trapline.gold.attention.dense.hopper import backward as hopper_backward
    from trapline.gold.attention.dense.hopper import tiles as hopper

    return {
        "hopper": Tier(hopper_backward.backward, hopper.supports, hopper_backward.is_faster),
        **tiers,
    }


def fastest(problem: Problem, tiers: dict[str, Tier]) -> str:
    """The first tier that supports the problem and is faster there; "triton" if none does."""
    for name, tier in tiers.items():
        if tier.supports(problem) is None and tier.is_faster(problem):
            return name
    return "triton"


def tier_for(problem: Problem, impl: str, tiers: dict[str, Tier]) -> tuple[str, Tier]:
    """The tier that computes the problem, and its name; an error if it does not support it."""
    _require_gpu(problem, impl)
    name = fastest(problem, tiers) if impl == "kernels" else impl
    if name not in tiers:
        raise UnsupportedError(f"impl={name!r} is off: {untested_release()}; use impl='triton'")
    reason = tiers[name].supports(problem)
    if reason is None:
        return name, tiers[name]
    if name != "triton":
        raise UnsupportedError(f"impl={name!r} does not support {reason}; use impl='triton'")
    kind = RangeError if "heads" in reason else DTypeError
    raise kind(f"the attention kernels do not support {reason}; use impl='torch'")


def _require_gpu(problem: Problem, impl: str) -> None:
    if problem.q.is_cuda:
        return
    from triton import knobs

    if not knobs.runtime.interpret:
        place = problem.q.device
        raise UnsupportedError(
            f"impl={impl!r} needs CUDA tensors, got tensors on {place}; use impl='torch'"
        )
