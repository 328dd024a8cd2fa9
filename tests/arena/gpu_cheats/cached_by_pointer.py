# attack: remember answers by the addresses of the tensors
# defence: the same storage comes again with other values
# expect: fail
# succeeds-without: fresh-values one-value-changes
# uses: honest

SEEN = {}


def scaled(x, by, y):
    key = x.shape, x.data_ptr(), by.data_ptr()
    if key not in SEEN:
        honest(x, by, y)
        SEEN[key] = y.clone()
    y.copy_(SEEN[key])
