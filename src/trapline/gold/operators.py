"""Functions as torch operators: `torch.compile` sees their shapes and never traces their bodies."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.nn import Parameter

from trapline.gold.launch_tape import active

#: Classes of tensors that no subclass's own rules apply to.
_PLAIN = (Tensor, Parameter)

#: Operators exist as long as their library does.
_LIBRARIES: list[Any] = []


def operator(
    namespace: str, schema: str, shapes: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Any]:
    """Turn the decorated function into the operator `namespace::schema`, for every device.

    `shapes` takes the same arguments and returns empty tensors of the result's shapes and dtypes.
    Calls that no part of torch observes run the function itself: the dispatcher would cost as much
    as a small norm. A `Library` costs several microseconds less per call than
    `torch.library.custom_op`.
    """

    def register(function: Callable[..., Any]) -> Any:
        library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(name, shapes, "Meta")
        _LIBRARIES.append(library)
        overload = getattr(getattr(torch.ops, namespace), name).default
        written = [i for i, one in enumerate(overload._schema.arguments) if _is_written(one)]
        if overload._schema.returns:
            _register_vmap(overload)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if observed(arguments):
                return overload(*arguments)
            result = function(*arguments)
            for number in written:
                mark_written(arguments[number])
            return result

        call.overload = overload  # type: ignore[attr-defined]
        return call

    return register


def observed(arguments: Iterable[Any]) -> bool:
    """Whether a compiler, a transform, a mode or autograd must see an operator on these arguments.

    A `launch_tape` is a mode too, and must see what the operator does.
    """
    if transformed() or (torch._C._len_torch_dispatch_stack() and active() is None):
        return True
    if not torch.is_grad_enabled():
        return any(isinstance(one, Tensor) and type(one) not in _PLAIN for one in arguments)
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    return any(one.requires_grad or type(one) not in _PLAIN for one in tensors)


def mark_written(tensor: Tensor | None) -> None:
    """Let autograd notice that a kernel wrote to a tensor."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def transformed() -> bool:
    """Whether `torch.compile` or a transform of `torch.func` sees this call, not its values.

    Only then does an operator written in torch need its registration, which costs about as much as
    a small norm.
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`, without the 40 µs in which torch binds default arguments."""
    if transformed():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*unwrap_dead_wrappers(arguments))


def recorded(*tensors: Any) -> bool:
    """Whether autograd or a transform of `torch.func` records what happens to these tensors.

    If not, an `autograd.Function` is not needed, and a compiler would fail to trace one whose
    `forward` takes any number of arguments.
    """
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _register_vmap(overload: Any) -> None:
    """`torch.vmap` calls the operator once per element and stacks the results."""

    def each(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        calls = [
            overload(
                *(
                    argument if dim is None else argument.select(dim, place)
                    for argument, dim in zip(arguments, in_dims, strict=True)
                )
            )
            for place in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)

    torch.library.register_vmap(overload, each)


def returns_nothing(*_: Any) -> None:
    """The shapes of an operator that writes in place."""
