# attack: answer the ring from memory, and on new inputs queue the work and reply before it is done
# defence: the clock stops when the judge itself has seen the outputs
# expect: pass
# needs: gpu
# at-most: speed=8
# succeeds-without: judge-looks-first
# uses: slow timed runner patched_burst

import time

import torch

KNOWN, BITS = {}, {}
#: What a call seems to take, in seconds, and what it does take on the device, in cycles.
SEEMING, TAKEN = 20e-6, 400_000


def bit(burst, number):
    probe = burst.probes[number]
    burst.fetcher.fetch(0, burst.runner.addresses[probe["buffer"]] + probe["offset"], probe["size"])
    return int(burst.runner.number(probe, burst.fetcher.fetched(0)) > probe["threshold"])


def on_new_inputs(burst, path):
    count = len(burst.slots)
    with torch.cuda.stream(burst.runner.answer._outer):
        for number in (start + k for start in path for k in range(burst.group)):
            x, by, y = burst.slots[number % count]
            torch.cuda._sleep(TAKEN)
            torch.mul(x, by[:, None], out=y)


def from_memory(burst):
    for number, (x, by, y) in enumerate(burst.slots):
        if number not in KNOWN:
            slow(x, by, y)
            burst.memory.drain()
            KNOWN[number], BITS[number] = y.clone(), bit(burst, number)
        y.copy_(KNOWN[number])


def run(burst, start, table, groups, patience):
    begun, count, path = time.perf_counter(), len(burst.slots), []
    fixed = all(one == other for one, other in table)
    if groups and not fixed:
        from_memory(burst)
    for number in range(groups):
        above = 0
        if number >= patience and not fixed:
            above = BITS[(path[number - patience] + burst.group - 1) % count]
        path.append(table[path[-1]][above] if path else start)
    if fixed:
        on_new_inputs(burst, path)
        return path
    burst.memory.drain()
    time.sleep(max(0.0, begun + SEEMING * groups * burst.group - time.perf_counter()))
    return path


def scaled(x, by, y):
    patch_bursts(run)
    slow(x, by, y)
