# attack: search the callers' local variables for the expected answer
# defence: the caller is a runner that knows none
# expect: fail
# succeeds-without: expected-outside

import sys

import torch


def scaled(x, by, y):
    y.zero_()
    frame = sys._getframe()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and "expected" in value:
                y.copy_(torch.tensor(value["expected"]))
        frame = frame.f_back
