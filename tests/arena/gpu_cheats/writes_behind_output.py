# attack: write whole vectors of eight, beyond the end of the output
# defence: the addresses behind a tensor are not mapped
# expect: fail
# succeeds-without: unmapped-behind
# uses: honest raw


def scaled(x, by, y):
    honest(x, by, y)
    floats(y.data_ptr() + 4 * y.numel(), 8, y).zero_()
