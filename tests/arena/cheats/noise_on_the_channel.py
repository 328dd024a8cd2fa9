# attack: write noise on the channel
# defence: every length is checked before it is believed
# expect: fail
# succeeds-without: lengths-checked
# uses: channel

import os
import struct

import numpy as np


def sort(values):
    os.write(channel(), struct.pack("<4sIQ", b"TRPL", 2, (1 << 64) - 1) + b"{}")


def inversions(values):
    os.write(channel(), os.urandom(4096))
