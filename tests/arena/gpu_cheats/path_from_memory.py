# attack: replace the runner's bursts: fill every slot once from memory and work out the path
# defence: slots get inputs never seen before, and calls on the ring may not be much faster
# expect: pass
# at-most: speed=8
# succeeds-without: fresh-inputs
# uses: slow timed runner patched_burst

KNOWN, BITS = {}, {}


def learn(burst, number):
    x, by, y = burst.slots[number]
    if number not in KNOWN or float(KNOWN[number][0]) != float(x[0, 0]):
        slow(x, by, y)
        burst.memory.drain()
        KNOWN[number] = x[0, 0].clone(), y.clone()
        probe = burst.probes[number]
        burst.fetcher.fetch(0, burst.runner.addresses[probe["buffer"]] + probe["offset"], probe["size"])
        BITS[number] = int(burst.runner.number(probe, burst.fetcher.fetched(0)) > probe["threshold"])
    y.copy_(KNOWN[number][1])


def run(burst, start, table, groups, patience):
    count, path = len(burst.slots), []
    for number in range(count if groups else 0):
        learn(burst, number)
    for number in range(groups):
        above = 0
        if number >= patience:
            above = BITS[(path[number - patience] + burst.group - 1) % count]
        path.append(table[path[-1]][above] if path else start)
    burst.memory.drain()
    return path


def scaled(x, by, y):
    patch_bursts(run)
    slow(x, by, y)
