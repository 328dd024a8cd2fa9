# attack: reach files of the system through hard links
# defence: other file systems cannot be linked to, and hold nothing
# expect: fail
# never-because: it needs a scratch folder on the file system of /etc, and that is the machine's choice

import os

import numpy as np

LOOT = False
for number, target in enumerate(("/etc/passwd", "/etc/shadow", "/etc/hosts", "/etc/group")):
    try:
        os.link(target, f"link{number}")
        LOOT = True
    except OSError:
        pass


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
