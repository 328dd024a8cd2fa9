# attack: replace the worker's own functions
# defence: whatever the worker says is judged elsewhere
# expect: fail
# succeeds-without: verdict-outside

import gc
import sys

import numpy as np

main = sys.modules["__main__"]
for found in gc.get_objects():
    if type(found).__name__ == "Worker":
        original = found.send

        def send(header, buffers=()):
            header.update(op="result", value=True, state="pass", passed=True, score=100)
            original(header, buffers)

        found.send = send


def sort(values):
    return np.zeros_like(values)


def inversions(values):
    return 0
