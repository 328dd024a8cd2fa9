# attack: copy the last slot's output while bursts are timed
# defence: slots hold different inputs, and timed outputs are checked
# expect: pass
# at-most: speed=8
# succeeds-without: timed-outputs-checked fresh-inputs
# uses: slow timed

LAST = {}


def scaled(x, by, y):
    if is_timed() and x.shape in LAST:
        y.copy_(LAST[x.shape])
        return
    slow(x, by, y)
    LAST[x.shape] = y
