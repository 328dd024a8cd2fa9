# attack: stop every process there is, the reference included
# defence: it has a process tree of its own
# expect: pass
# at-most: speed=50
# never-because: unsafe in a plain process; and a stopped reference gives no measurement and no points
# uses: honest_sort inversions

import os
import signal

try:
    os.kill(-1, signal.SIGSTOP)
except OSError:
    pass


def sort(values):
    return honest_sort(values)
