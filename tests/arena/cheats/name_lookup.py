# attack: leak through the resolver
# defence: no socket, no resolver configuration
# expect: fail
# succeeds-at: process

import socket

import numpy as np

LOOT = False
for name in ("example.org", "localhost"):
    try:
        socket.getaddrinfo(name, 80)
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
