"""Imports NumPy inside a sandbox without its docstrings and its type hints.

A sandbox takes 0.2 s to start, most of it this import, and a third of that attaches docstrings and
builds unions of types, which calls of a submission never look at.
"""

import gc
import sys
from types import ModuleType

#: Attach docstrings to functions written in C, and nothing else.
_DOCSTRINGS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
#: NumPy itself needs it for the hints of a few classes; `numpy.typing` imports it when asked for.
_HINTS = "numpy._typing"


class _Hints(ModuleType):
    """Any hint is a list of something."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return list


def import_numpy() -> None:
    """What stands in for the modules left out is gone afterwards: the real ones can be imported."""
    left_out = {name: ModuleType(name) for name in _DOCSTRINGS} | {_HINTS: _Hints(_HINTS)}
    sys.modules.update(left_out)
    gc.disable()  # nothing is garbage yet
    try:
        import numpy  # noqa: F401
    finally:
        gc.enable()
        for name in left_out:
            del sys.modules[name]
