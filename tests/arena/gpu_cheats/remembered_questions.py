# attack: keep every question with its answer, and compute only what was never asked
# defence: slots get inputs never seen before, and calls on the ring may not be much faster
# expect: pass
# at-most: speed=8
# succeeds-without: fresh-inputs
# uses: slow

SEEN = {}


def scaled(x, by, y):
    known = SEEN.get(x.data_ptr())
    if known is None or not (known[0].shape == x.shape and known[0].equal(x) and known[1].equal(by)):
        slow(x, by, y)
        SEEN[x.data_ptr()] = x.clone(), by.clone(), y.clone()
        return
    y.copy_(known[2])
