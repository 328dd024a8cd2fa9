"""What a GPU entry point takes and what it writes.

An entry point of the GPU track gets its inputs and then its outputs, tensors that the judge owns,
and returns nothing. Checks see it as a function of NumPy arrays: `Entry.outputs` says which outputs
a call has. NumPy lacks bfloat16, so that such an array is float32 with a mark.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from trapline.arena.errors import ArenaError

#: What a solution.cu includes; part of every prompt.
HEADER = Path(__file__).with_name("trapline.h")
#: Names of dtypes as torch spells them → the NumPy dtype of the same bytes.
STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}


#: The byte that fills what nobody has written: 3.4e38 in float32 and bfloat16, NaN in float16.
POISON = 0x7F


class BFloat16(np.ndarray):
    """A float32 array whose values are those of bfloat16; it travels as bfloat16."""


def bfloat16(values: Any) -> BFloat16:
    """Rounds to the nearest bfloat16, ties to even."""
    wide = np.ascontiguousarray(values, dtype=np.float32)
    return widen(narrow(wide)).view(BFloat16)


def narrow(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values as bfloat16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    halves = bits.view(np.uint16)  # hosts of GPUs are little-endian
    if not halves[..., ::2].any():  # values of bfloat16 already: nothing to round
        return halves[..., 1::2].copy()
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    is_nan = np.isnan(values)
    return np.where(is_nan, np.uint32(0x7FC0), rounded >> np.uint32(16)).astype(np.uint16)


def widen(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def dtype_name(array: np.ndarray) -> str:
    """The dtype that a tensor made from this array has, as torch spells it."""
    if isinstance(array, BFloat16):
        return "bfloat16"
    if array.dtype.name not in STORED:
        raise ArenaError(f"a GPU entry point takes no array of {array.dtype}")
    return array.dtype.name


def rounded(values: Any, dtype: str) -> np.ndarray:
    """The values as an array that travels with this dtype."""
    return bfloat16(values) if dtype == "bfloat16" else np.asarray(values).astype(STORED[dtype])


@dataclass(frozen=True)
class Output:
    """A tensor that the caller allocates and the entry point fills."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Entry:
    """One entry point: `outputs` gets the arguments of a call; `updated` names by position the
    inputs that the call may write, whose new contents belong to the answer."""

    outputs: Callable[..., tuple[Output, ...]]
    updated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timed:
    """One shape whose time is measured."""

    #: Such as `4096×32000 float32, k 64`.
    name: str
    entry: str
    #: Makes the arguments of one call; called once for each buffer that the clock rotates through.
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    #: The least that any implementation must do: bytes to `read` and `write`, operations of a
    #: matrix product in `bfloat16` or `float32`. Other operations (`vector`) bound no time; they
    #: place the shape in the roofline plot.
    light: Mapping[str, float]
    #: GPU memory beyond inputs and outputs that costs no points, in bytes.
    workspace: int = 64 << 20
    #: Largest difference from the gold solution's outputs: relative to each output's largest value.
    tolerance: float = 0.02


def entries(module: ModuleType) -> Mapping[str, Entry]:
    """The table `ENTRIES` of a GPU challenge's module `cases`."""
    found: Mapping[str, Entry] = module.ENTRIES
    return found


def poison(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What an output holds before a call: NaN, or numbers too large for an answer."""
    stored = STORED[dtype]
    size = int(np.prod(shape, dtype=np.int64)) * stored.itemsize
    return np.full(size, POISON, np.uint8).view(stored).reshape(shape)


def answer_of(arrays: list[np.ndarray], dtypes: list[str]) -> Any:
    """What a check gets: one array, or a tuple of them; bfloat16 as float32."""
    shown = [
        widen(array) if dtype == "bfloat16" else array
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]
    return shown[0] if len(shown) == 1 else tuple(shown)
