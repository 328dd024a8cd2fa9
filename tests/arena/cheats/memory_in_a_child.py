# attack: use quadratic memory in a child that has ended when memory is measured
# defence: the kernel counts for the whole sandbox and remembers
# expect: pass
# at-most: memory=80
# needs: cgroup
# succeeds-without: control-group
# uses: honest_sort inversions

import os

ROUNDS = 1


def sort(values):
    if len(values) >= 4096 and os.fork() == 0:
        waste = b"x" * (len(values) ** 2 // 320)
        os._exit(len(waste) and 0)
    if len(values) >= 4096:
        os.wait()
    return honest_sort(values)
