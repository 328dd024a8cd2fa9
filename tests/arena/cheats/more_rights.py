# attack: become somebody else, or more
# defence: no capability, no set-user-id program, no_new_privs
# expect: fail
# succeeds-at: process

import os

import numpy as np

LOOT = os.getuid() == 0
for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.chroot("/"), lambda: os.chown("/tmp", 0, 0)):
    try:
        attempt()
        LOOT = True
    except OSError:
        pass
for program in ("/usr/bin/sudo", "/usr/bin/su", "/bin/mount"):
    try:
        open(program, "rb").close()
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
