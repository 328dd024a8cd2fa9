# attack: close the channel and go on
# defence: a pass needs answers
# expect: fail
# succeeds-without: a-pass-needs-answers
# uses: channel

import os

import numpy as np


def sort(values):
    os.close(channel())
    return values


def inversions(values):
    os.close(channel())
