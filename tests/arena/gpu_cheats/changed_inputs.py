# attack: change the question until zeros are its answer
# defence: the judge keeps its own copy of the inputs
# expect: fail
# succeeds-without: own-copy-of-inputs


def scaled(x, by, y):
    x.zero_()
    y.zero_()
