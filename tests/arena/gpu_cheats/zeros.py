# attack: write zeros
# defence: values are compared
# expect: fail
# succeeds-without: values-compared


def scaled(x, by, y):
    y.zero_()
