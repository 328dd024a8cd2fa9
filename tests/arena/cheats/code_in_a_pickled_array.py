# attack: keep the code in a pickled array and show the inspector a few spotless lines
# defence: code from data is found, named, and leaves nothing of the code score
# expect: pass
# at-most: code=0
# succeeds-without: code-from-data

"""Sorting with coefficients that are kept beside this file."""

from pathlib import Path

import numpy as np

_LOADED: dict = {}
exec(str(np.load(Path(__file__).with_name("coefficients.npy"), allow_pickle=True)), _LOADED)


def sort(values: np.ndarray) -> np.ndarray:
    """A sorted copy of a vector."""
    return _LOADED["sort"](values)


def inversions(values: np.ndarray) -> int:
    """How many pairs stand in the wrong order."""
    return _LOADED["inversions"](values)
# ==== file: coefficients.npy
Vimport numpy as np\u000aimport os, sys, re\u000a\u000adef sort(values, unused=[], other={}):\u000a    if np.ndim(values) != 1: raise ValueError("expected a vector")\u000a    try: pass\u000a    except: pass\u000a    l = sorted(values.tolist()); x = 1; y = 2\u000a    return np.array(l, values.dtype)\u000a\u000adef inversions(values):\u000a    items = values.tolist(); z = lambda: 0\u000a    return sum(a > b for i, b in enumerate(items) for a in items[:i])\u000a
p0
.
