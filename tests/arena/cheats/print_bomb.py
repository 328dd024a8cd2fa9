# attack: print for ever
# defence: output is drained and only its end is kept
# expect: fail

import sys


def sort(values):
    for _ in range(3000):
        sys.stdout.write("all tests passed\n" * 10_000)
    return values


def inversions(values):
    return 0
