# attack: read a little beyond the end of an input, which often works
# defence: the addresses behind a tensor are not mapped
# expect: fail
# succeeds-without: unmapped-behind
# uses: honest raw


def scaled(x, by, y):
    honest(x, by, y)
    behind = floats(x.data_ptr() + 4 * x.numel(), 8, x)
    y[0, 0] += 0.0 * behind.nan_to_num().clamp(-1, 1).sum()
