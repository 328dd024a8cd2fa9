# attack: read environment, memory and files of others in /proc
# defence: /proc shows the sandbox only
# expect: fail
# succeeds-at: process

import os

import numpy as np

LOOT = False
for name in os.listdir("/proc") if os.access("/proc", os.R_OK) else []:
    if name.isdecimal() and int(name) not in (1, os.getpid()):
        for file in ("environ", "maps"):
            try:
                with open(f"/proc/{name}/{file}", "rb") as text:
                    LOOT = LOOT or bool(text.read())
            except OSError:
                pass


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
