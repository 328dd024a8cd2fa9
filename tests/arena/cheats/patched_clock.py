# attack: replace every clock of the interpreter
# defence: the clock is the judge's
# expect: pass
# at-most: speed=50
# succeeds-without: verdict-outside
# uses: honest_sort inversions

import time

for name in ("time", "perf_counter", "monotonic", "process_time", "perf_counter_ns", "time_ns"):
    setattr(time, name, lambda: 0)


def sort(values):
    return honest_sort(values)
