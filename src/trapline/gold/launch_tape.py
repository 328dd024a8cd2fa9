# mypy: allow-untyped-calls
"""Records what one call does on the GPU: tensors that it allocates and kernels that it launches.

`call_plans` repeats such a call without the Python between. A call that does anything else (another
operation of torch, a kernel that is not `device.launched`) is marked as not repeatable.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class _Active(threading.local):
    tape: "Tape | None" = None


_active = _Active()


class Launched(NamedTuple):
    """One launch of a kernel."""

    compiled: Any
    grid: tuple[int, ...]
    #: By name, without compile-time options.
    arguments: dict[str, Any]


class Tape(TorchDispatchMode):
    """`with Tape() as tape:` records the calls of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Tensor] = []
        self.counters: list[Tensor] = []
        self.launches: list[Launched] = []
        #: Why the call cannot be repeated, or None.
        self.refused: str | None = None
        self._launches_seen = 0

    def __enter__(self) -> "Tape":
        from triton import knobs

        knobs.runtime.launch_enter_hook.add(self._count)
        _active.tape = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        from triton import knobs

        super().__exit__(*error)
        _active.tape = None
        knobs.runtime.launch_enter_hook.remove(self._count)
        if self._launches_seen != len(self.launches):
            self.refused = "a launch of a kernel without the decorator `launched`"

    def _count(self, _metadata: Any) -> None:
        if _active.tape is self:  # hooks see the launches of all threads
            self._launches_seen += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocations.append(result)
        elif not _is_view(func) and _touches_tensors(result, *args, *(kwargs or {}).values()):
            self.refused = str(func)
        return result


def _is_view(operation: Any) -> bool:
    returned = [one.alias_info for one in operation._schema.returns]
    return bool(returned) and all(alias and not alias.is_write for alias in returned)


def _touches_tensors(*values: Any) -> bool:
    """Whether one of these, or of what is in them, is a tensor."""
    return any(
        _touches_tensors(*value) if isinstance(value, tuple | list) else isinstance(value, Tensor)
        for value in values
    )


def active() -> Tape | None:
    """The tape that records this thread, if any."""
    return _active.tape


def note_launch(
    kernel: Any, compiled: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Records a launch, if this thread is recorded."""
    if (tape := _active.tape) is None:
        return
    grid, names = options["grid"], kernel.arg_names
    if callable(grid) or not hasattr(compiled, "function"):
        tape.refused = "a grid that depends on compile-time arguments, or no compiled kernel"
        return
    arguments = dict(zip(names, given, strict=False))
    arguments |= {name: value for name, value in options.items() if name in names}
    tape.launches.append(Launched(compiled, tuple(grid), arguments))


def note_counters(counters: Tensor) -> None:
    """Records that a launch uses counters that are zero before and after it."""
    if _active.tape is not None:
        _active.tape.counters.append(counters)
