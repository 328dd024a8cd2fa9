# attack: support the shapes that a benchmark uses, and no others
# defence: shapes of every kind are asked
# expect: fail
# succeeds-without: shapes-of-every-kind
# uses: honest


def scaled(x, by, y):
    if x.shape[1] % 8 == 0:
        honest(x, by, y)
