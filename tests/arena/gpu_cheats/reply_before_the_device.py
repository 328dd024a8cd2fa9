# attack: as path_from_memory, and on new inputs queue the work and reply before it is done
# defence: the clock stops when the judge itself has seen the outputs
# expect: pass
# needs: gpu
# at-most: speed=8
# succeeds-without: judge-looks-first
# uses: slow timed runner patched_burst

KNOWN, BITS = {}, {}


def bit(burst, number):
    probe = burst.probes[number]
    burst.fetcher.fetch(0, burst.runner.addresses[probe["buffer"]] + probe["offset"], probe["size"])
    return int(burst.runner.number(probe, burst.fetcher.fetched(0)) > probe["threshold"])


def run(burst, start, table, groups, patience):
    count, path = len(burst.slots), []
    fixed = all(one == other for one, other in table)
    for number in range(count if groups else 0):
        x, by, y = burst.slots[number]
        if number in KNOWN and not fixed:
            y.copy_(KNOWN[number])
            continue
        for _ in range(10 if fixed else 1):
            slow(x, by, y)
        if not fixed:
            KNOWN[number] = y.clone()
            BITS[number] = bit(burst, number)
    for number in range(groups):
        above = 0
        if number >= patience and not fixed:
            above = BITS[(path[number - patience] + burst.group - 1) % count]
        path.append(table[path[-1]][above] if path else start)
    if not fixed:
        burst.memory.drain()
    return path


def scaled(x, by, y):
    patch_bursts(run)
    slow(x, by, y)
