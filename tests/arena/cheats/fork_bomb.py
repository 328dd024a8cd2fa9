# attack: fork forever
# defence: processes are counted, and all end with the sandbox
# expect: fail
# slow: yes
# never-because: unsafe: it would take the machine (TestBombs lets a small one off)

import os

import numpy as np


def sort(values):
    while True:
        try:
            os.fork()
        except OSError:
            pass


def inversions(values):
    return 0
