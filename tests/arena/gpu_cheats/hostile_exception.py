# attack: raise an exception whose message cannot be written down
# defence: what a runner says is cut and cleaned
# expect: fail
# succeeds-without: writable-text


def scaled(x, by, y):
    raise ValueError("\udcff\x1b[2J" + "x" * 100_000)
