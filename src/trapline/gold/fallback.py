"""Kernels that do not compile: the next tier serves the call, with one warning that says why.

A tier that failed is not tried again in this process. Gluon, the language of the Hopper kernels, is
experimental and changes with every release, so those kernels run with tested releases only.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import TypeVar

from trapline.gold.errors import FallbackWarning

#: Oldest and newest minor release of Triton that the kernels are tested with: docs/versions.md.
TESTED = (3, 6), (3, 9)
_Answer = TypeVar("_Answer")
#: Operation and tier of every tier that did not compile in this process.
_failed: set[tuple[str, str]] = set()


def first_that_compiles(operation: str, tiers: Mapping[str, Callable[[], _Answer]]) -> _Answer:
    """The answer of the first tier whose kernels compile; the last tier's errors are raised.

    A tier must leave nothing behind that would change the answer of the next one.
    """
    names = list(tiers)
    for name, following in pairwise(names):
        if (operation, name) in _failed:
            continue
        try:
            return tiers[name]()
        except Exception as error:
            if not is_compile_error(error):
                raise
            _failed.add((operation, name))
            warnings.warn(
                f"the {name} kernels of {operation} do not compile with Triton {_version()}:"
                f" {_reason(error)}; the tier '{following}' serves in this process. Tested:"
                f" Triton {_tested_range()}",
                FallbackWarning,
                stacklevel=2,
            )
    return tiers[names[-1]]()


def is_compile_error(error: Exception) -> bool:
    """Whether Triton's compiler or assembler raised the error."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    # A failing pass of the compiler is a plain RuntimeError, as are errors of a launch.
    failed_pass = type(error) is RuntimeError and "PassManager" in str(error)
    return failed_pass or isinstance(error, CompilationError | PTXASError)


@cache
def gluon_is_tested() -> bool:
    """Whether this Triton is in the tested range; warns if it is not, once per process."""
    reason = untested_release()
    if reason is not None:
        message = f"{reason}: the Hopper kernels are off, the tier 'triton' serves in this process"
        warnings.warn(message, FallbackWarning, stacklevel=2)
    return reason is None


def untested_release() -> str | None:
    """None, or that the installed Triton is outside of the tested range."""
    oldest, newest = TESTED
    numbers = re.match(r"(\d+)\.(\d+)", _version())
    if numbers and oldest <= (int(numbers[1]), int(numbers[2])) <= newest:
        return None
    return f"Triton {_version()} is outside of the tested range, {_tested_range()}"


def _version() -> str:
    import triton

    return str(triton.__version__)


def _tested_range() -> str:
    return " to ".join(f"{major}.{minor}" for major, minor in TESTED)


def _reason(error: BaseException) -> str:
    """The last line of the error at the root: the lines before quote the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return lines[-1] if lines else type(error).__name__
