# attack: write noise on the channel
# defence: every length is checked before it is believed
# expect: fail
# succeeds-without: lengths-checked

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
    os.write(channel(), b"TRPL" + b"\xff" * 4096)


def inversions(values):
    os.write(channel(), os.urandom(4096))
