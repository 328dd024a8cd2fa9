# attack: write NaN, which no comparison finds too large
# defence: NaN counts as wrong where the right answer is a number
# expect: fail
# succeeds-without: nan-is-no-number


def scaled(x, by, y):
    y.fill_(float("nan"))
