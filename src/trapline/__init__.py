"""Trapline: who writes LLM-systems code that you can trust?"""

from typing import Any

#: Of a source tree that was not installed.
NOT_INSTALLED = "0+source"


def __getattr__(name: str) -> Any:
    """`trapline.__version__`, read when it is asked for: the metadata take time to import."""
    if name != "__version__":
        raise AttributeError(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trapline")
    except PackageNotFoundError:
        return NOT_INSTALLED
