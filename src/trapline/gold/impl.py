"""Chooses the implementation for a call. `impl=` overrides; there is no silent fallback.

NumPy arrays go to the `oracle`, torch CPU tensors to `torch`, CUDA tensors to the `kernels`. Where
kernels come in tiers, `kernels` uses the fastest that supports the call; `triton` and `hopper`
request one tier. If the kernels of a tier do not compile, the next one serves with a warning.

| function | impl |
|---|---|
| layer_norm, layer_norm_backward, rms_norm | oracle, torch, kernels |
| softmax_topk | oracle, torch, kernels |
| flash_attention, flash_attention_lse | oracle, torch, kernels, triton, hopper |
| flash_attention_backward, flash_attention_varlen | oracle, torch, kernels, triton, hopper |
| paged_attention | oracle, torch, kernels |
| paged_append | torch, kernels |
| ternarize | oracle, torch |
"""

import sys
from typing import Any, Literal, get_args

import numpy as np

from trapline.gold.errors import DTypeError, RangeError, UnsupportedError

Impl = Literal["oracle", "torch", "kernels", "triton", "hopper"]
_NATURAL: dict[str, Impl] = {
    "NumPy arrays": "oracle",
    "CPU tensors": "torch",
    "CUDA tensors": "kernels",
}


def choose(operation: str, offered: tuple[Impl, ...], impl: Impl | None, **arguments: Any) -> Impl:
    """The implementation for these arguments; an error names the available ones."""
    kind = _kind(arguments)
    if impl is not None and impl not in get_args(Impl):
        raise RangeError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    chosen = impl or _NATURAL[kind]
    numpy = kind == "NumPy arrays"
    if (chosen == "oracle") != numpy:
        raise DTypeError(f"impl={chosen!r} does not take {kind}")
    if chosen not in offered:
        others = " or ".join(repr(name) for name in offered if (name == "oracle") == numpy)
        instead = f"use impl={others}" if others else f"no implementation takes {kind}"
        raise UnsupportedError(f"{operation} has no {chosen!r} implementation; {instead}")
    return chosen


def _kind(arguments: dict[str, Any]) -> str:
    torch = sys.modules.get("torch")
    if torch is not None:  # the usual case, without a message for the others
        tensor = torch.Tensor
        places = {v.is_cuda if isinstance(v, tensor) else None for v in arguments.values()}
        if len(places) == 1 and None not in places:
            return "CUDA tensors" if places.pop() else "CPU tensors"
    kinds = {name: _kind_of(name, value) for name, value in arguments.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is one of the {kind}" for name, kind in kinds.items())
        raise DTypeError(f"all arrays must be of one kind, but {listed}")
    return next(iter(kinds.values()))


def _kind_of(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "NumPy arrays"
    # A tensor can only exist if torch has been imported.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "CUDA tensors" if value.is_cuda else "CPU tensors"
    raise DTypeError(f"{name} must be a NumPy array or a torch tensor, got {type(value).__name__}")
