"""Repeats a call on a GPU without the Python between the caller and the driver.

The checks, the choice of kernels and their launches depend on shapes, strides, dtypes and options,
not on values. So a call with the same ones as before needs new outputs, the addresses of its
tensors, and the same launches: a `CallPlan`. The second such call is recorded (`launch_tape`); a
call that allocates and launches only can be repeated. Every other call takes the ordinary way:
gradients that autograd records, transforms of `torch.func`, dispatch modes such as fake tensors,
addresses that are not multiples of 16, a current device other than the tensors'.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Parameter
from triton import knobs

from trapline.gold.arithmetic import cdiv
from trapline.gold.bound_launch import BoundLaunch, Buffer, bound, ensure_context
from trapline.gold.completion_counters import counters_of
from trapline.gold.launch_tape import Tape
from trapline.gold.operators import mark_written

#: Plans of one function; a program with more shapes than this starts anew.
MOST_PLANS = 2048
#: Bits of an address that Triton's specialised kernels expect to be 0.
_UNALIGNED = 15
#: Scratch tensors begin at multiples of this, as torch's allocator gives them.
_SCRATCH_ALIGNMENT = 512
_DEVICE = "cuda"
_BF16 = torch.bfloat16
_ONCE, _NEVER = "seen once", "cannot be repeated"
_OTHER = object()

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_grad_enabled, _autocast = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_hooks = knobs.runtime.launch_enter_hook
if not hasattr(_hooks, "calls"):
    raise ImportError("this release of Triton has no list of launch hooks; calls are not repeated")
_empty_like, _empty_strided = torch.empty_like, torch.empty_strided


def _current_device() -> int:
    return int(torch._C._cuda_getDevice())


def _current_stream(device: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device))


#: Whether calls are repeated. Without it every call takes the ordinary way, to compare the two.
repeating = True
#: How many calls were repeated so far.
repetitions = 0


class Output(NamedTuple):
    """A tensor that a call returns.

    `torch.empty_like` is the cheapest way to allocate. It takes an argument of the call, or one
    element that is expanded to the shape.
    """

    #: The number of an argument with the same shape, strides and dtype, or None.
    like: int | None
    #: A tensor with the same shape and dtype whose likes have the same strides, or None.
    model: Tensor | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class CallPlan:
    """The outputs, the scratch memory and the launches of one call."""

    def __init__(
        self,
        device: torch.device,
        outputs: list[Output],
        scratch: int,
        counters: list[int],
        launches: list[BoundLaunch],
        build: Callable[[list[Tensor], list[Tensor]], Any],
    ) -> None:
        self._device = device
        self._outputs, self._counters = outputs, counters
        self._scratch = _model((scratch,), torch.uint8, device) if scratch else None
        self._launches, self._build = launches, build
        self.index = device.index
        self.call: KnownCall | None = None

    def run(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        """What the call returns; `addresses` are those of the tensors, and are extended."""
        global repetitions
        repetitions += 1
        made = []
        for like, model, shape, strides, dtype in self._outputs:
            if like is not None:
                out = _empty_like(tensors[like])
            elif model is not None:
                out = _empty_like(model)
            else:
                out = _empty_strided(shape, strides, dtype=dtype, device=self._device)
            made.append(out)
            addresses.append(out.data_ptr())
        if self._scratch is not None:
            scratch = _empty_like(self._scratch)
            addresses.append(scratch.data_ptr())
        if self._counters:
            self._add_counters(made, addresses)
        addresses.append(0)
        ensure_context(self.index)
        stream = _current_stream(self.index)
        for launch in self._launches:
            launch(addresses, stream)
        return self._build(made, tensors)

    def _add_counters(self, made: list[Tensor], addresses: list[int]) -> None:
        """Counters that are 0, and that no other launch in flight uses."""
        counters, keep = counters_of(self._device), torch.cuda.is_current_stream_capturing()
        for count in self._counters:
            address = counters.address(count, keep=keep)
            if address is None:  # a long capture has used them up
                made.append(torch.zeros(count, dtype=torch.int32, device=self._device))
                address = made[-1].data_ptr()
            addresses.append(address)


class KnownCall(NamedTuple):
    """What a call with a plan was given; `check` compares the tensors of another call at once.

    It is torch's own check of types, shapes, strides, dtypes, devices and dispatch keys; the last
    say whether autocast is on, and whether a tensor is negated.
    """

    plan: CallPlan
    length: int
    names: tuple[str, ...]
    #: Positions, values and types of the arguments that are not tensors.
    options: tuple[tuple[int, Any, type], ...]
    places: tuple[int, ...]
    #: Whether autograd would record the call if gradients were enabled.
    differentiable: bool
    check: Callable[..., bool]


def known_call(plan: CallPlan, given: tuple[Any, ...], names: tuple[str, ...]) -> KnownCall:
    places = tuple(i for i, one in enumerate(given) if isinstance(one, Tensor))
    tensors = [given[i] for i in places]
    others = tuple((i, x, x.__class__) for i, x in enumerate(given) if i not in places)
    exact: dict[str, Any] = {
        "dynamic_dims_sizes": [list(x.shape) for x in tensors],
        "dynamic_dims_strides": [list(x.stride()) for x in tensors],
    }
    guards = TensorGuards(*tensors, **exact)
    differentiable = any(x.requires_grad for x in tensors)
    return KnownCall(plan, len(given), names, others, places, differentiable, guards.check)


class CallPlans:
    """The plans of one function, by what its arguments are."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._plans: dict[Any, CallPlan | str] = {}
        #: The last call with a plan, by the shape of its first tensor.
        self._known: dict[Any, KnownCall] = {}
        _all_plans.append(self)

    def __call__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if _transforms() or _modes() or _hooks.calls or not repeating:
            return self._function(*arguments, **options)
        known = self._known.get(arguments[0].shape)
        if known is not None:
            result = self._repeated(known, arguments, options)
            if result is not _OTHER:
                return result
        return self._looked_up(arguments, options)

    def _repeated(
        self, known: KnownCall, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """The result, if this call equals the known one except for addresses; else _OTHER."""
        given = (*arguments, *options.values()) if options else arguments
        plan, length, names, others, places, differentiable, check = known
        if len(given) != length or ((options or names) and tuple(options) != names):
            return _OTHER
        if differentiable and _grad_enabled():
            return _OTHER
        for place, value, kind in others:
            one = given[place]
            if one is not value and (one.__class__ is not kind or one != value):
                return _OTHER
        tensors = [given[place] for place in places]
        if not check(*tensors) or plan.index != _current_device():
            return _OTHER
        addresses = [one.data_ptr() for one in tensors]
        for address in addresses:
            if address & _UNALIGNED:
                return _OTHER
        return plan.run(tensors, addresses)

    def _looked_up(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        grad = _grad_enabled()
        key: list[Any] = [_autocast(), *options]
        tensors: list[Tensor] = []
        addresses: list[int] = []
        given = (*arguments, *options.values())
        for one in given:
            kind = one.__class__
            if kind is Tensor or kind is Parameter:
                dtype = one.dtype
                key += (one.shape, one.stride(), dtype, one.get_device())
                address = one.data_ptr()
                # Only views of complex numbers are negated; bf16 has none of these.
                negated = dtype is not _BF16 and one.is_neg()
                if negated or address & _UNALIGNED or (grad and one.requires_grad):
                    return self._function(*arguments, **options)
                tensors.append(one)
                addresses.append(address)
            else:
                key += (one, kind)
        hashable = tuple(key)
        try:
            plan = self._plans.get(hashable)
        except TypeError:  # an argument that cannot be hashed: the checks say what is wrong
            return self._function(*arguments, **options)
        if isinstance(plan, CallPlan) and plan.index == _current_device():
            plan.call = plan.call or known_call(plan, given, tuple(options))
            self._known[arguments[0].shape] = plan.call
            return plan.run(tensors, addresses)
        if plan == _ONCE:
            return self._recorded(hashable, tensors, arguments, options)
        if plan is None:
            self._remember(hashable)
        return self._function(*arguments, **options)

    def _remember(self, key: tuple[Any, ...]) -> None:
        """Note that a call came once: many never come again, and recording takes time."""
        if len(self._plans) >= MOST_PLANS:
            self.forget()
        self._plans[key] = _ONCE

    def _recorded(
        self, key: Any, tensors: list[Tensor], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """The ordinary call, recorded."""
        addresses = [one.data_ptr() for one in tensors]
        aliased = len(set(addresses)) < len(addresses)
        if aliased or tensors[0].device.index != _current_device():
            return self._function(*arguments, **options)  # another call may do better
        with Tape() as tape:
            result = self._function(*arguments, **options)
        try:
            plan = plan_of(tape, tensors, result)
        except (AttributeError, KeyError, OSError):  # a Triton or a driver with other records
            plan = None
        self._plans[key] = plan or _NEVER
        return result

    def forget(self) -> None:
        self._plans.clear()
        self._known.clear()


_all_plans: list[CallPlans] = []


def forget_plans() -> None:
    """Forgets all plans, after a change of what kernels are launched with."""
    for plans in _all_plans:
        plans.forget()


def plan_of(tape: Tape, tensors: list[Tensor], result: Any) -> CallPlan | None:
    """The plan of a recorded call, or None if it cannot be repeated."""
    if tape.refused or not tape.launches or torch.version.hip:
        return None
    if any(one.device.type != _DEVICE for one in tensors):
        return None
    made = [one for one in _tensors_in(result) if not any(one is other for other in tensors)]
    places = _Places(tape, tensors, made)
    launches = [bound(*one, places.buffer_of) for one in tape.launches]
    if not places.outputs_are_whole or None in launches:
        return None
    outputs = [_output(one, tensors) for one in made]
    counters = [one.numel() for one in tape.counters]
    kept = [one for one in launches if one is not None]
    build = _builder(result, made, tensors)
    return CallPlan(tensors[0].device, outputs, places.scratch, counters, kept, build)


class _Places:
    """Where a call's tensors come from: its arguments, its outputs, scratch memory, counters.

    They are numbered in this order; the last number is the address 0 of empty tensors.
    """

    def __init__(self, tape: Tape, tensors: list[Tensor], made: list[Tensor]) -> None:
        owned = {_start(one): one for one in tape.allocations if one.numel()}
        self._arguments = {one.data_ptr(): Buffer(i, 0) for i, one in enumerate(tensors)}
        self._owned: dict[int, Buffer] = {}
        self.outputs_are_whole = True
        number = len(tensors)
        for one in made:
            if one.numel():
                allocated = owned.pop(_start(one), None)
                self.outputs_are_whole &= allocated is not None and _is_whole(one, allocated)
                self._owned[_start(one)] = Buffer(number, 0)
            number += 1
        self.scratch = 0
        for start, one in owned.items():
            self._owned[start] = Buffer(number, self.scratch)
            size = one.untyped_storage().nbytes()
            self.scratch += cdiv(size, _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        number += self.scratch > 0
        for one in tape.counters:
            self._arguments[one.data_ptr()] = Buffer(number, 0)
            number += 1
        self._nothing = Buffer(number, 0)

    def buffer_of(self, one: Tensor) -> Buffer | None:
        """Where a tensor begins; None for one that the call got from elsewhere."""
        address, start = one.data_ptr(), _start(one)
        if not address:
            return self._nothing
        if start not in self._owned:
            return self._arguments.get(address)
        number, offset = self._owned[start]
        return Buffer(number, offset + address - start)


def _start(one: Tensor) -> int:
    return one.untyped_storage().data_ptr()


def _is_whole(one: Tensor, allocated: Tensor) -> bool:
    """Whether a returned tensor is all of an allocated one, in any order of its axes."""
    return (
        one.storage_offset() == 0
        and one.dtype == allocated.dtype
        and one.numel() == allocated.numel()
    )


def _output(one: Tensor, tensors: list[Tensor]) -> Output:
    shape, strides = tuple(one.shape), one.stride()
    like = None
    if one.is_contiguous():
        for number, other in enumerate(tensors):
            same = tuple(other.shape) == shape and other.dtype == one.dtype
            if same and other.stride() == strides:
                like = number
                break
    model = _model(shape, one.dtype, one.device)
    # On the meta device: an output may be as large as all that is left of the memory.
    fits = _empty_like(model, device="meta").stride() == strides
    return Output(like, model if fits else None, shape, strides, one.dtype)


def _model(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element, expanded to a shape."""
    return torch.empty(1, dtype=dtype, device=device).expand(shape)


def _tensors_in(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [one for one in result or () if isinstance(one, Tensor)]


def _builder(
    result: Any, made: list[Tensor], tensors: list[Tensor]
) -> Callable[[list[Tensor], list[Tensor]], Any]:
    """From the new outputs and the arguments to what the function returns."""
    if isinstance(result, Tensor):
        if made:
            return lambda new, _: new[0]
        (number,) = (i for i, one in enumerate(tensors) if one is result)
        return lambda _, given: _marked(given[number])
    if result is None:
        return lambda *_: None
    sources: list[tuple[int, Any]] = []
    for one in result:
        places = [i for i, other in enumerate((*made, *tensors)) if other is one]
        sources.append((places[0], None) if places else (-1, one))
    kind = result.__class__

    def build(new: list[Tensor], given: list[Tensor]) -> Any:
        everything = (*new, *given)
        values = (value if place < 0 else everything[place] for place, value in sources)
        return kind(*values) if kind is not tuple else tuple(values)

    return build


def _marked(tensor: Tensor) -> Tensor:
    mark_written(tensor)
    return tensor
