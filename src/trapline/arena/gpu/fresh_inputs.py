"""Times on inputs that an answer has not seen, compared with its times on the ring.

A timed burst visits the ring's slots many times with the same inputs, and the answer owns the
process that visits them: it could recognise them and remember what it wrote. So, once the ring is
timed, slots get new inputs, each is visited once, and the clock stops when the judge itself has
seen the outputs. An answer that is much faster on the ring has not done the work there.
"""

import random
import time
from itertools import pairwise

import numpy as np

from trapline.arena.errors import Violation
from trapline.arena.gpu.burst import LAG
from trapline.arena.gpu.contract import POISON
from trapline.arena.gpu.rig import Call, GpuSubmission
from trapline.arena.gpu.timing import Clock, Ring, Times, compare

ROUNDS = 3
#: A call on the ring takes at least this share of a call on new inputs. Those few calls are timed
#: less exactly than the ring.
LEAST_SHARE = 0.5
#: Seconds by which hand-overs and looks of one burst may differ from those of another.
SLACK = 150e-6
#: Making new inputs for one round takes about this long at most.
MAKING_SECONDS = 2.0
#: Outputs at which the judge looks before the clock stops.
LOOKS = 4
_LOOK_BYTES = 16


def refuse_remembered(clock: Clock, gold: GpuSubmission, times: Times) -> float:
    """Seconds of a call on new inputs; a `Violation` where calls on the ring are much faster.

    Afterwards the ring holds other inputs than those that it was made with.
    """
    reference = Clock(clock.ring, gold)
    idle = min(_visit(reference, [])[0] for _ in range(ROUNDS))
    fresh = min(_seconds(clock, gold, idle) for _ in range(ROUNDS))
    if times.best < LEAST_SHARE * fresh:
        raise Violation(
            f"a call of {clock.ring.timed.name} took {times.best * 1e6:.1f} µs on inputs it had "
            f"seen before and {fresh * 1e6:.1f} µs on new ones: it remembers answers"
        )
    return fresh


def _seconds(clock: Clock, gold: GpuSubmission, idle: float) -> float:
    """At least so many seconds a call on new inputs takes; its outputs are checked."""
    with clock.answer.frozen():
        count = _renew(clock.ring)
    path = list(range(0, count, clock.ring.group))
    random.shuffle(path)
    taken, looked = _visit(clock, path)
    with clock.answer.frozen():
        _check(clock.ring, gold, random.choice(looked))
    return max(0.0, taken - idle - SLACK) / count


def _renew(ring: Ring) -> int:
    """Writes new inputs into as many slots as can be made in time, and poisons all outputs."""
    rng, begun, count = np.random.default_rng(), time.monotonic(), 0
    whole = len(ring.slots) // ring.group * ring.group
    while count < whole and (count < ring.group or time.monotonic() < begun + MAKING_SECONDS):
        for slot in ring.slots[count : count + ring.group]:
            slot.args = ring.timed.make(rng)
            slot.write_inputs()
        count += ring.group
    ring.poison()
    return count


def _visit(clock: Clock, path: list[int]) -> tuple[float, list[int]]:
    """Seconds until the judge has seen outputs of these groups, and the slots that it looked at.

    The path is fixed, which the answer may know: on inputs it has not seen there is nothing to
    gain from that.
    """
    slots = clock.ring.slots
    table = [[0, 0] for _ in slots]
    for here, there in pairwise(path):
        table[here] = [there, there]
    visited = [start + k for start in path for k in range(clock.ring.group)]
    looked = random.choices(visited or range(len(slots)), k=LOOKS)
    start = path[0] if path else 0
    begun = time.perf_counter()
    reply = clock.tell(start=start, table=table, groups=len(path), patience=LAG)
    written = [_is_written(slots[number]) for number in looked]
    seconds = time.perf_counter() - begun
    if reply.get("path") != path:
        raise Violation("a timed call took another path than the one it was given")
    if path and not all(written):
        raise Violation("said that it had finished before its outputs were written")
    return seconds, looked


def _is_written(slot: Call) -> bool:
    """A few bytes of one output, wherever they lie, are not poison."""
    place = random.choice(slot.outputs)
    size = min(_LOOK_BYTES, place.span)
    offset = place.offset + random.randrange(place.span - size + 1)
    data = slot.rig.judge.read(place.buffer.number, offset, size)
    return data.count(POISON) < size


def _check(ring: Ring, gold: GpuSubmission, number: int) -> None:
    """Every element of the slot's outputs against what the gold solution writes there."""
    slot = ring.slots[number]
    got = slot.read_written()
    slot.poison_outputs()
    gold.tell({"op": "call", "entry": ring.timed.entry, "values": slot.nodes}, slot.placed)
    compare(slot, got, slot.read_written(), ring.timed)
