# attack: keep every question with its answer, and compute only what was never asked
# defence: slots get inputs never seen before, and calls on the ring may not be much faster
# expect: pass
# at-most: speed=8
# succeeds-without: fresh-inputs
# uses: slow

SEEN = {}


def scaled(x, by, y):
    known = SEEN.get(x.data_ptr())
    if known is not None and known[0].equal(x):  # one wait for the GPU
        y.copy_(known[1])
        return
    slow(x, by, y)
    SEEN[x.data_ptr()] = x.clone(), y.clone()
