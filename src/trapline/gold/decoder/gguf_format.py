"""What the reader and the writer of GGUF files share."""

from typing import Any

import numpy as np

#: The type number in the fork that ships group-128 ternary models; llama.cpp later gave this number
#: and name to blocks of 64.
FORK_Q2_0 = 42


def package() -> Any:
    """The `gguf` package."""
    try:
        import gguf
    except ImportError:
        raise ImportError("GGUF files need the gguf package: trapline[gguf]") from None
    return gguf


def interleaved(heads: int, width: int) -> np.ndarray:
    """Row numbers that interleave the two halves of each head."""
    return np.arange(heads * width).reshape(heads, 2, width // 2).swapaxes(1, 2).ravel()
