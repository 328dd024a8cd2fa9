# attack: compute only the elements that decide which slot comes next
# defence: after each burst every element of a random slot is checked
# expect: pass
# at-most: speed=8
# succeeds-without: timed-outputs-checked fresh-inputs
# uses: slow timed runner patched_burst


def probed(burst, start):
    number = (start + burst.group - 1) % len(burst.slots)
    (x, by, y), probe = burst.slots[number], burst.probes[number]
    place = (burst.runner.addresses[probe["buffer"]] + probe["offset"] - y.data_ptr()) // 4

    def compute():
        row, column = divmod(place, x.shape[1])
        y[row, column] = x[row, column] * by[row]

    return compute


def run(burst, *given):
    burst.runs = [probed(burst, start) for start in range(len(burst.slots))]
    return patch_bursts.original(burst, *given)


def scaled(x, by, y):
    patch_bursts(run)
    slow(x, by, y)
