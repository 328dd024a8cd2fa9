# attack: talk to a daemon of the system
# defence: no socket can be made, and none is in the file system
# expect: fail
# succeeds-at: process

import socket

import numpy as np

LOOT = False
for address in ("/var/run/docker.sock", "/run/dbus/system_bus_socket", "\0anything"):
    try:
        socket.socket(socket.AF_UNIX)
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
