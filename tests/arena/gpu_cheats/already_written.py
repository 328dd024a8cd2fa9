# attack: skip the work where the output no longer holds poison
# defence: slots get inputs never seen before, and calls on the ring may not be much faster
# expect: pass
# at-most: speed=8
# succeeds-without: fresh-inputs
# uses: slow


def scaled(x, by, y):
    if float(y[-1, -1]) > 1e38:
        slow(x, by, y)
