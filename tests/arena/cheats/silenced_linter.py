# attack: switch the linter off with a comment
# defence: comments do not switch it off
# expect: pass
# at-most: code=40
# succeeds-without: comments-ignored

# ruff: noqa
# flake8: noqa
import numpy as np
import os, sys, re, json
import collections

l = 1


def sort(values):
    if np.ndim(values) != 1:
        raise ValueError("expected a vector")
    unused = 1
    other = 2
    try:
        pass
    except:
        pass
    if values is None == True:
        return None
    else:
        return np.array(sorted(values.tolist()), values.dtype)


def inversions(values, kept=[], more={}):
    items = values.tolist()
    total = lambda: 0
    return sum(a > b for i, b in enumerate(items) for a in items[:i])
