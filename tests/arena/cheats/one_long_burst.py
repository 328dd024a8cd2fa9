# attack: skip the rest of some bursts and hope that one answer a burst is checked
# defence: every answer of the calls that decide is checked
# expect: pass
# at-most: speed=50
# succeeds-without: timed-answers-checked
# uses: honest_sort inversions

import time

ROUNDS = 10


LAST, IN_BURST, SKIPPED = 0.0, 0, 0


def sort(values):
    global LAST, IN_BURST, SKIPPED
    if len(values) != 16384:
        return honest_sort(values)
    IN_BURST = IN_BURST + 1 if time.perf_counter() - LAST < 0.002 else 1
    skips = IN_BURST > 1 and SKIPPED < 15
    SKIPPED += skips
    answer = values.copy() if skips else honest_sort(values)
    LAST = time.perf_counter()
    return answer
