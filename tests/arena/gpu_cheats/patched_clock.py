# attack: make every clock of the process run a hundred times slower
# defence: the clock is the controller's
# expect: pass
# at-most: speed=8
# succeeds-without: clock-outside fresh-inputs
# uses: slow

import time

import torch


def slower(clock):
    return lambda: clock() / 100


for name in ("time", "monotonic", "perf_counter"):
    setattr(time, name, slower(getattr(time, name)))
torch.cuda.Event.elapsed_time = lambda *events: 0.001


def scaled(x, by, y):
    slow(x, by, y)
