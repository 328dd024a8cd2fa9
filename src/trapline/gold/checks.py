"""Checks at the public boundary, for NumPy arrays and torch tensors alike.

Axes are named by letters: `axes(x=(x, "B T D"), weight=(weight, "D"))` holds when every letter has
one size. A leading `...` stands for any number of axes, the same in all arguments that have it.
"""

import operator
import sys
from collections.abc import Collection
from typing import Any, Protocol

from trapline.gold.errors import DTypeError, RangeError, ShapeError

FLOATS = ("float32", "float64")
LOW_FLOATS = ("float16", "bfloat16", *FLOATS)


class ArrayLike(Protocol):
    """What a NumPy array and a torch tensor have in common."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


def dtype_name(array: ArrayLike) -> str:
    """`float32`, whichever library it comes from."""
    return str(array.dtype).removeprefix("torch.")


def arrays(**arguments: Any) -> None:
    """Every argument is an array."""
    for name, value in arguments.items():
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise DTypeError(f"{name} must be an array, got {type(value).__name__}")


def axes(**arguments: tuple[ArrayLike, str]) -> dict[str, int]:
    """The size of every letter; `ShapeError` when a rank or a size does not fit."""
    sizes: dict[str, int] = {}
    leading: tuple[str, tuple[int, ...]] | None = None
    for name, (array, letters) in arguments.items():
        shape = tuple(int(size) for size in array.shape)
        named = letters.split()
        if named[0] == "...":
            named = named[1:]
            if len(shape) < len(named):
                raise ShapeError(f"{name} must have axes ({letters}), got shape {shape}")
            cut = len(shape) - len(named)
            lead, shape = shape[:cut], shape[cut:]
            if leading is not None and leading[1] != lead:
                raise ShapeError(
                    f"{name} has leading axes {lead}, but {leading[0]} has {leading[1]}"
                )
            leading = (name, lead)
        elif len(shape) != len(named):
            raise ShapeError(f"{name} must have axes ({letters}), got shape {shape}")
        for letter, size in zip(named, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ShapeError(
                    f"{name} has {letter} = {size}, but an earlier argument has {sizes[letter]}"
                )
    return sizes


def floating(*allowed: str, **arguments: ArrayLike) -> None:
    """All arguments have one dtype, and it is among the allowed ones."""
    names = {name: dtype_name(array) for name, array in arguments.items()}
    for name, dtype in names.items():
        if dtype not in allowed:
            raise DTypeError(f"{name} must be {_either(allowed)}, got {dtype}")
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in names.items())
        raise DTypeError(f"all arguments must have one dtype, got {listed}")


def one_device(**arguments: Any) -> None:
    """Torch tensors are all on one device; NumPy arrays are ignored."""
    places = {name: x.device for name, x in arguments.items() if hasattr(x, "requires_grad")}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} is on {place}" for name, place in places.items())
        raise DTypeError(f"all tensors must be on one device, but {listed}")


def reads_values(check: bool | None, array: Any) -> bool:
    """Whether to check values: as asked, and by default if they can be read without waiting."""
    if check is not None:
        return check
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return True
    return not (array.is_cuda or array.is_meta or torch.compiler.is_compiling())


def positive(**arguments: float) -> None:
    """Every argument is a finite number above zero."""
    for name, value in arguments.items():
        try:
            fits = 0.0 < value < float("inf")
        except TypeError:
            raise DTypeError(f"{name} must be a number, got {value!r}") from None
        if not fits:
            raise RangeError(f"{name} must be positive and finite, got {value}")


#: Options of other libraries' `generate`, and what says the same here.
_ELSEWHERE = {
    "num_return_sequences": "give n=… with sampling=Sampling(…) to Decoder.generate, or for the n "
    "best of a beam search Beams(width, n_best=n) or beam_search(…, n_best=n)",
    "num_beams": "give beams=n",
    "max_length": "give max_new_tokens, which does not count the prompt",
    "do_sample": "give sampling=Sampling(temperature=…), or nothing for greedy decoding",
    **dict.fromkeys(
        (
            *("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        ),
        "give sampling=Sampling(…) instead",
    ),
}


def refuse_options(function: str, unknown: dict[str, Any]) -> None:
    """No option is left over; the message names what to give instead."""
    for name in unknown:
        instead = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise TypeError(f"{function} has no option {name!r}{instead}")


def integers(**arguments: Any) -> None:
    """Every argument is an integer of any library. Reads tensors, so not for traced code."""
    for name, value in arguments.items():
        try:
            fits = not isinstance(value, bool) and operator.index(value) == value
        except TypeError:
            fits = False
        if not fits:
            raise DTypeError(f"{name} must be an integer, got {type(value).__name__}")


def integer_between(low: int, high: int, **arguments: Any) -> None:
    """Every argument is an integer in [low, high]."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise DTypeError(f"{name} must be an integer, got {type(value).__name__}")
        if not low <= value <= high:
            raise RangeError(f"{name} must be between {low} and {high}, got {value}")


def _either(names: Collection[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
