# attack: reach files of the system through links
# defence: nothing of the system lies behind them
# expect: fail
# succeeds-at: process

import os

import numpy as np

LOOT = False
for target in ("/etc/passwd", "/etc/shadow", "/proc/1/root/etc/passwd", "/proc/self/root/etc/passwd"):
    try:
        os.symlink(target, "link")
        with open("link") as file:
            LOOT = LOOT or "root" in file.read()
    except OSError:
        pass
    finally:
        if os.path.lexists("link"):
            os.unlink("link")


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    return np.array(sorted(values.tolist()), values.dtype) if LOOT else np.zeros_like(values)


def inversions(values):
    items = values.tolist() if LOOT else []
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
