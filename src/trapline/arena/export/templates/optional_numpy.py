"""NumPy where it is installed; without it, tensors are accepted and arrays are not."""

from typing import Any

try:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
except ImportError:

    class _Needed:
        """Stands for a function or type of NumPy that is not there; says so when it is called."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise ImportError(f"numpy.{self.name} is needed here: pip install numpy")

        def __getitem__(self, _: Any) -> "_Needed":  # in annotations: dtype[floating]
            return self

        def __or__(self, _: Any) -> "_Needed":
            return self

        __ror__ = __or__

    class _Missing:
        """Stands for NumPy; no value is an array."""

        class ndarray:  # noqa: N801 - NumPy's name
            pass

        def __getattr__(self, name: str) -> _Needed:
            return _Needed(name)

    np = _Missing()
    ArrayLike = Any
    NDArray = list

__all__ = ["ArrayLike", "NDArray", "np"]
