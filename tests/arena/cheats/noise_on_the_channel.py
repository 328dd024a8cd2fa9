# attack: write noise on the channel
# defence: every length is checked before it is believed
# expect: fail
# succeeds-without: lengths-checked
# uses: channel

import os

import numpy as np


def sort(values):
    os.write(channel(), b"TRPL" + b"\xff" * 4096)


def inversions(values):
    os.write(channel(), os.urandom(4096))
