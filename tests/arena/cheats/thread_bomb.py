# attack: start threads forever
# defence: threads are counted like processes
# expect: fail
# never-because: unsafe: it would take the machine (TestBombs lets a small one off)

import threading
import time

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    while True:
        threading.Thread(target=time.sleep, args=(600,)).start()


def inversions(values):
    return 0
