# attack: walk from the interpreter's folder to site-packages and the checkout behind an editable install
# defence: site-packages is masked; nothing but the asked packages is shown
# expect: fail
# succeeds-at: process

import glob
import os
import sys

import numpy as np

PLACES = [os.path.dirname(os.path.dirname(os.__file__)), sys.prefix, sys.base_prefix]
PLACES += [os.path.dirname(os.path.dirname(os.path.realpath(np.__file__)))]
FOUND = []
for place in PLACES:
    for pattern in ("**/trapline*", "**/*trapline*.pth", "**/__editable__*"):
        FOUND += glob.glob(os.path.join(place, "lib*", pattern), recursive=True)
        FOUND += glob.glob(os.path.join(place, pattern.removeprefix("**/")))
LOOT = bool(FOUND)


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
