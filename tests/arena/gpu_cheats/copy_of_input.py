# attack: copy the input, which is near the answer where factors are near one
# defence: values are compared with a bound that knows their scale
# expect: fail
# succeeds-without: values-compared


def scaled(x, by, y):
    y.copy_(x)
