# attack: look at the callers, and compute one row while bursts are timed
# defence: timed outputs are checked like all others
# expect: pass
# at-most: speed=8
# succeeds-without: timed-outputs-checked fresh-inputs
# uses: slow timed


def scaled(x, by, y):
    if not is_timed():
        slow(x, by, y)
        return
    y[:1] = x[:1] * by[0]
