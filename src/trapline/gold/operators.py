"""Functions as torch operators: `torch.compile` sees their shapes and never traces their bodies."""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers

#: Operators exist as long as their library does.
_LIBRARIES: list[Any] = []


def operator(
    namespace: str, schema: str, shapes: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Any]:
    """Turn the decorated function into the operator `namespace::schema`, for every device.

    `shapes` takes the same arguments and returns empty tensors of the result's shapes and dtypes.
    A `Library` costs several microseconds less per call than `torch.library.custom_op`.
    """

    def register(function: Callable[..., Any]) -> Any:
        library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(name, shapes, "Meta")
        _LIBRARIES.append(library)
        overload = getattr(getattr(torch.ops, namespace), name).default
        if overload._schema.returns:
            _register_vmap(overload)
        return overload

    return register


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
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
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
