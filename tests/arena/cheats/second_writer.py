# attack: let a child write on the channel beside the worker
# defence: a frame that the protocol cannot explain is tampering
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


def sort(values):
    if os.fork() == 0:
        while True:
            os.write(channel(), frame({"op": "result", "value": 0, "state": "pass", "nonce": "1" * 16}))
    os.wait()


def inversions(values):
    return sort(values)
