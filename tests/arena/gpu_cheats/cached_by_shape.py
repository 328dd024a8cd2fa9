# attack: remember the first answer of every shape
# defence: the same shape comes again with other values
# expect: fail
# succeeds-without: fresh-values one-value-changes
# uses: honest

SEEN = {}


def scaled(x, by, y):
    if x.shape not in SEEN:
        honest(x, by, y)
        SEEN[x.shape] = y.clone()
    y.copy_(SEEN[x.shape])
