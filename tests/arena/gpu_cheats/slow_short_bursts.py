# attack: make short bursts as long as long ones, so that the slope between them vanishes
# defence: a time is at least a share of the long burst's mean, and of a call's on new inputs
# expect: pass
# at-most: speed=8
# succeeds-without: least-share fresh-inputs
# uses: slow timed runner patched_burst

import time

TAKEN = [0.0]


def run(burst, start, table, groups, patience):
    begun = time.perf_counter()
    path = patch_bursts.original(burst, start, table, groups, patience)
    if groups > 6:
        TAKEN[0] = time.perf_counter() - begun
    elif groups:
        time.sleep(max(0.0, TAKEN[0] - (time.perf_counter() - begun)))
    return path


def scaled(x, by, y):
    patch_bursts(run)
    slow(x, by, y)
