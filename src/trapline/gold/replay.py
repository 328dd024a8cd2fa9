"""A decorator for public functions: calls on a GPU repeat what an equal call launched before."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def replayed(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """`function`, whose first argument decides: CUDA tensors use `trapline.gold.call_plans`.

    It must be a function of shapes, strides, dtypes and options, except for what its kernels do.
    """
    plans: Any = None

    @wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Answer:
        nonlocal plans
        if not arguments or not getattr(arguments[0], "is_cuda", False):
            return function(*arguments, **options)
        if sys.modules["torch"].compiler.is_compiling():
            return function(*arguments, **options)
        if plans is None:
            plans = _plans_of(function)
        return plans(arguments, options)  # type: ignore[no-any-return]

    return call


def _plans_of(function: Callable[..., Any]) -> Any:
    """Plans where Triton is there to launch kernels, and otherwise the function itself."""
    try:
        from trapline.gold.call_plans import CallPlans
    except ImportError:
        return lambda arguments, options: function(*arguments, **options)
    return CallPlans(function)
