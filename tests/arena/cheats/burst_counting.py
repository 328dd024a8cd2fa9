# attack: be slow at the start of every burst until only long bursts can follow
# defence: a burst cannot take less than its calls do
# expect: pass
# at-most: speed=50
# succeeds-without: least-share random-burst-order
# uses: honest_sort inversions

import time

CALLS, LAST, BURSTS = 0, 0.0, []


def sort(values):
    global LAST
    if len(values) == 16384:
        now = time.perf_counter()
        if now - LAST > 0.002:
            BURSTS.append(0)
        BURSTS[-1] += 1
        ended = BURSTS[1:-1]
        if BURSTS[-1] == 1 and ended.count(1) < 3:
            time.sleep(0.3)
    answer = honest_sort(values)
    LAST = time.perf_counter()
    return answer
