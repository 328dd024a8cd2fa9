# attack: be slow in the first call of every burst, so that the others seem fast beside it
# defence: only the cheapest calls count, and no difference between calls is taken
# expect: pass
# at-most: speed=50
# never-because: the time of a slow call is not taken from that of others, so it lowers nothing
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
