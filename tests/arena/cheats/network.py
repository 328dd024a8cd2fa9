# attack: fetch the answer from the network
# defence: there is none, and no socket can be made
# expect: fail
# succeeds-at: process

import socket

import numpy as np

LOOT = False
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind).close()
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
