# attack: close the channel and go on
# defence: a pass needs answers
# expect: fail
# succeeds-without: a-pass-needs-answers

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
    os.close(channel())
    return values


def inversions(values):
    os.close(channel())
