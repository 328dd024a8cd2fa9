"""Times on inputs that an answer has not seen, compared with its times on the ring.

A timed burst visits the ring's slots many times with the same inputs, and the answer owns the
process that visits them: it could recognise them and remember what it wrote. So, once the ring is
timed, the slots of one group get new inputs and are visited once, and the clock stops when the
judge itself has seen the outputs. An answer that is much faster on the ring has not done the work
there.
"""

import math
import random
import time

import numpy as np

from trapline.arena.errors import Violation
from trapline.arena.gpu.burst import LAG
from trapline.arena.gpu.contract import POISON
from trapline.arena.gpu.rig import Call, GpuSubmission
from trapline.arena.gpu.timing import Clock, Ring, Times, compare

#: An answer is refused after so many bursts on new inputs, and one that clears it is enough: no
#: burst is shorter than the work in it, and other work on the machine only makes it longer.
ROUNDS = 8
#: A call on the ring takes at least this share of a call on new inputs. Those few calls are timed
#: less exactly than the ring.
LEAST_SHARE = 0.5
#: Seconds by which hand-overs and looks of one burst may differ from those of another, and the most
#: that they are taken to last, or the gold solution's own work if that is longer: an answer could
#: make them seem longer by what it left on the GPU.
SLACK, MOST_HAND_OVER = 300e-6, 2e-3
#: Outputs at which the judge looks before the clock stops.
LOOKS = 4
_LOOK_BYTES = 16


def refuse_remembered(clock: Clock, gold: GpuSubmission, times: Times) -> float:
    """Seconds of a call on new inputs; a `Violation` where calls on the ring are much faster.

    Afterwards the ring holds other inputs than those that it was made with.
    """
    ring, reference, fresh = clock.ring, Clock(clock.ring, gold), math.inf
    work = reference.times(1).best * ring.group
    for _ in range(ROUNDS):
        fresh = min(fresh, _seconds(clock, reference, work))
        if times.best >= LEAST_SHARE * fresh:
            return fresh
    raise Violation(
        f"a call of {ring.timed.name} took {times.best * 1e6:.1f} µs on inputs it had seen before "
        f"and {fresh * 1e6:.1f} µs on new ones: it remembers answers"
    )


def _seconds(clock: Clock, reference: Clock, work: float) -> float:
    """At least so many seconds a call on new inputs takes; its outputs are checked.

    The gold solution, which is `reference`, visits the same inputs before: what it takes beyond its
    `work` is what waking a process, handing over and looking take. Its first visit brings the GPU
    back to its clocks.
    """
    ring = clock.ring
    start = random.randrange(len(ring.slots))
    group = [ring.slots[(start + k) % len(ring.slots)] for k in range(ring.group)]
    with clock.answer.frozen():
        rng = np.random.default_rng()
        for slot in group:
            slot.args = ring.spare.pop() if ring.spare else ring.timed.make(rng)
            slot.write_inputs()
        _, taken_by_gold = (_woken(reference, group, start) for _ in range(2))
    hand_over = min(max(0.0, taken_by_gold - work), max(MOST_HAND_OVER, work))
    taken = _woken(clock, group, start)
    with clock.answer.frozen():
        _check(ring, reference.answer, random.choice(group))
    return max(0.0, taken - hand_over - SLACK) / len(group)


def _woken(clock: Clock, group: list[Call], start: int) -> float:
    """Seconds of a visit by a process that was frozen before."""
    with clock.answer.frozen():
        clock.ring.poison()
    return _visit(clock, group, start)


def _visit(clock: Clock, slots: list[Call], start: int) -> float:
    """Seconds until the judge has seen outputs of these slots, which one group visits.

    The answer may know that these are new inputs: there is nothing to gain from that.
    """
    table = [[start, start] for _ in clock.ring.slots]
    looked = random.choices(slots, k=LOOKS)
    begun = time.perf_counter()
    reply = clock.tell(start=start, table=table, groups=1, patience=LAG)
    written = [_is_written(slot) for slot in looked]
    seconds = time.perf_counter() - begun
    if reply.get("path") != [start]:
        raise Violation("a timed call took another path than the one it was given")
    if not all(written):
        raise Violation("said that it had finished before its outputs were written")
    return seconds


def _is_written(slot: Call) -> bool:
    """A few bytes of one output, wherever they lie, are not poison."""
    place = random.choice(slot.outputs)
    size = min(_LOOK_BYTES, place.span)
    offset = place.offset + random.randrange(place.span - size + 1)
    data = slot.rig.judge.read(place.buffer.number, offset, size)
    return data.count(POISON) < size


def _check(ring: Ring, gold: GpuSubmission, slot: Call) -> None:
    """Every element of the slot's outputs against what the gold solution writes there."""
    got = slot.read_written()
    slot.poison_outputs()
    gold.tell({"op": "call", "entry": ring.timed.entry, "values": slot.nodes}, slot.placed)
    compare(slot, got, slot.read_written(), ring.timed)
