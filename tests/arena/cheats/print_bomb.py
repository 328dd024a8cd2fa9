# attack: print forever
# defence: output is drained and only its end is kept
# expect: fail
# succeeds-without: bounded-output

import sys


def sort(values):
    for _ in range(600):
        sys.stdout.write("all tests passed\n" * 10_000)
    return values


def inversions(values):
    return 0
