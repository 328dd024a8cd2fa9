# attack: answer at once and let a thread fill the answer in after the clock has stopped
# defence: the bytes are on the wire before the clock stops
# expect: fail
# succeeds-without: verdict-outside
# uses: inversions

import threading
import time

import numpy as np


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    answer = np.zeros_like(values)

    def later():
        time.sleep(0.02)
        answer[:] = sorted(values.tolist())

    threading.Thread(target=later, daemon=True).start()
    return answer
