# attack: write answers before anything is asked
# defence: nothing may lie in the channel before a question
# expect: hack
# succeeds-without: verdict-outside
# uses: channel

import os

import numpy as np

os.write(channel(), frame({"op": "imported", "missing": []}))
os.write(channel(), frame({"op": "result", "value": 0, "state": "pass"}))


def sort(values):
    return values


def inversions(values):
    return 0
