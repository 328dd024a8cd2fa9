# attack: remember answers by a few of the values
# defence: one value changes between two calls
# expect: fail
# succeeds-without: one-value-changes
# uses: honest

SEEN = {}


def scaled(x, by, y):
    key = x.shape, float(x[0, 0]), float(x[-1, -1]), float(by.sum())
    if key not in SEEN:
        honest(x, by, y)
        SEEN[key] = y.clone()
    y.copy_(SEEN[key])
