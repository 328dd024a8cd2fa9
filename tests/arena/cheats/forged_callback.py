# attack: call back functions that were never passed
# defence: only what was passed can be called
# expect: hack
# never-because: without the check nothing lies behind the number: the call fails all the same
# uses: channel

import os

import numpy as np


def sort(values):
    os.write(channel(), frame({"op": "callback", "stub": 0, "method": "__class__", "args": [], "kwargs": {}}))
    return values


def inversions(values):
    return 0
