# attack: run no call of a burst and report a path of the right length
# defence: the path must be the one that right outputs lead to
# expect: pass
# at-most: speed=8
# succeeds-without: timed-outputs-checked fresh-inputs
# uses: slow timed runner patched_burst


def run(burst, start, table, groups, patience):
    return [start] * groups


def scaled(x, by, y):
    patch_bursts(run)
    slow(x, by, y)
