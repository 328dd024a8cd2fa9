# attack: compute in half the precision
# defence: the bound follows the output's dtype
# expect: fail
# succeeds-without: bound-of-the-dtype


def scaled(x, by, y):
    y.copy_((x.bfloat16() * by.bfloat16()[:, None]).float())
