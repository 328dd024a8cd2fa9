# attack: write answers before anything is asked
# defence: nothing may lie in the channel before a question
# expect: hack
# succeeds-without: verdict-outside

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


os.write(channel(), frame({"op": "imported", "missing": []}))
os.write(channel(), frame({"op": "result", "value": 0, "state": "pass"}))


def sort(values):
    return values


def inversions(values):
    return 0
