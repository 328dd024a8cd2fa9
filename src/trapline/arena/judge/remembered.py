"""What an oracle computes from the same arrays, kept: many answers meet the same situations.

Of the mutants of a challenge each is asked the same checks with the same draws, and so are the
answers of a run that share them.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
#: Of what one function keeps; what was not asked for longest goes first.
MOST_BYTES = 16 << 20
#: Larger arguments are not looked at: checks that draw them ask for little else.
MOST_GIVEN = 4 << 20


class _NotKeptError(Exception):
    """An argument or a result of another kind, or one too large."""


def remembered(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """For a pure function of arrays and plain values that gives an array or a tuple of arrays.

    The caller owns what it gets, whether it was computed or kept.
    """
    kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
    lock, held = threading.Lock(), 0

    @wraps(function)
    def once(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        nonlocal held
        try:
            key = tuple(map(_key, args)), tuple((k, _key(v)) for k, v in sorted(kwargs.items()))
        except _NotKeptError:
            return function(*args, **kwargs)
        with lock:
            found = kept.get(key)
            if found is not None:
                kept.move_to_end(key)
        if found is not None:
            copied: Result = _copied(found[0])
            return copied
        result = function(*args, **kwargs)
        try:
            own, size = _copied(result), _size(result)
        except _NotKeptError:
            return result
        with lock:
            if key not in kept and size <= MOST_BYTES:
                kept[key] = own, size
                held += size
            while held > MOST_BYTES:
                held -= kept.popitem(last=False)[1][1]
        return result

    return once


def _key(value: Any) -> Hashable:
    """Equal only for what is computed with alike: the order of sums depends on the strides."""
    if isinstance(value, np.ndarray):
        if value.nbytes > MOST_GIVEN or value.dtype.hasobject or type(value) is not np.ndarray:
            raise _NotKeptError
        data = value.tobytes()
        data = data if len(data) <= 64 else hashlib.blake2b(data, digest_size=32).digest()
        return "array", value.dtype.str, value.shape, value.strides, data
    if value is None or type(value) in (bool, int, float, str):
        # As text: 0.0 equals -0.0, and 1 equals True.
        return type(value).__name__, repr(value)
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return "scalar", value.dtype.str, value.tobytes()
    raise _NotKeptError


def _copied(value: Any) -> Any:
    if type(value) is np.ndarray:
        return value.copy(order="K")
    if isinstance(value, tuple):
        parts = [_copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    raise _NotKeptError


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else sum(map(_size, value))
