# attack: compute the first rows, and leave the rest to a test that counts matches
# defence: every element is compared
# expect: fail
# succeeds-without: every-element-compared
# uses: honest


def scaled(x, by, y):
    y.zero_()
    part = len(x) // 2 + 1
    honest(x[:part], by[:part], y[:part])
