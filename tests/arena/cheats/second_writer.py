# attack: let a child write on the channel beside the worker
# defence: a frame that the protocol cannot explain is tampering
# expect: hack
# succeeds-without: verdict-outside
# uses: channel

import os

import numpy as np


def sort(values):
    if os.fork() == 0:
        while True:
            os.write(channel(), frame({"op": "result", "value": 0, "state": "pass", "nonce": "1" * 16}))
    os.wait()


def inversions(values):
    return sort(values)
