# attack: use the memory before an output as a workspace
# defence: what lies before an output is checked after the call
# expect: fail
# succeeds-without: borders
# uses: honest raw


def scaled(x, by, y):
    honest(x, by, y)
    if y.data_ptr() % 4096 >= 64:
        floats(y.data_ptr() - 64, 4, y).fill_(1.0)
