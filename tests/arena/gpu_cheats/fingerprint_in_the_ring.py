# attack: recognise the ring's slots by a few values while bursts are timed
# defence: slots get inputs never seen before, and calls on the ring may not be much faster
# expect: pass
# at-most: speed=8
# succeeds-without: fresh-inputs
# uses: slow timed

SEEN = {}


def scaled(x, by, y):
    key = x.data_ptr(), float(x[0, 0]), float(x[-1, -1])
    if is_timed() and key in SEEN:
        y.copy_(SEEN[key])
        return
    slow(x, by, y)
    SEEN[key] = y.clone()
