# attack: write nothing where the output already holds the answer to the same question
# defence: outputs are poisoned before every call
# expect: fail
# succeeds-without: poison borders
# uses: honest

LAST = []


def scaled(x, by, y):
    question = x.clone(), by.clone()
    known = bool(LAST) and LAST[0].shape == x.shape and LAST[0].equal(x) and LAST[1].equal(by)
    LAST[:] = question
    if not known:
        honest(x, by, y)
