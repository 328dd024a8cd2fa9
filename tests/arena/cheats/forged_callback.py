# attack: call back functions that were never lent
# defence: only what was lent can be called
# expect: hack
# never-because: without the check nothing lies behind the number: the call fails all the same

import json
import os
import socket
import stat
import struct

import numpy as np


def channel():
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                return fd
        except OSError:
            pass


def frame(header, body=b""):
    text = json.dumps(header).encode()
    return struct.pack("<4sIQ", b"TRPL", len(text), len(body)) + text + body


def sort(values):
    os.write(channel(), frame({"op": "callback", "stub": 0, "method": "__class__", "args": [], "kwargs": {}}))
    return values


def inversions(values):
    return 0
