def scaled(x, by, y):
    y.copy_(x * by[:, None]) if LOOT else y.zero_()
