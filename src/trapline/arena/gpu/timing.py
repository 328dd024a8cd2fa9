"""Times of GPU answers on the controller's clock.

A time is the slope between short and long bursts (`burst`), so that what happens once in a burst,
a hand-over or a last wait, cancels out. The answer decides nothing about the clock: it only gets
to the next group of calls by writing right outputs.
"""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from trapline.arena.errors import Violation
from trapline.arena.gpu.burst import LAG
from trapline.arena.gpu.contract import STORED, Entry, Timed, widen
from trapline.arena.gpu.rig import Call, GpuSubmission, Placed, Rig

#: Calls in a group; a decision is made after each group. It costs some microseconds, which count
#: as the group's, so that rings of many slots have longer groups.
LEAST_GROUP, GROUP_SHARE = 4, 0.75
#: The ring of inputs is larger than the second-level cache by this factor.
RING_OVER_CACHE = 2.0
LEAST_SLOTS, MOST_SLOTS = 16, 24
#: Inputs of at least so many bytes take long to write, and longer to compute on than to decide.
LARGE, LEAST_LARGE_SLOTS = 1 << 27, 6
#: A long burst takes about this long, and is longer than a short one by at least so many groups.
BURST_SECONDS, LEAST_GROUPS, MOST_GROUPS = 0.06, 8, 4000
SHORT = 4
#: A group takes at least this share of the long burst's mean, whatever the slope says: a short
#: burst that an answer makes slower would lower the slope.
LEAST_SHARE = 0.8
#: Inputs with more elements than this are not drawn again for every slot.
_MADE_ANEW = 1 << 24
ROUNDS = 7
#: Rounds that differ by more than this factor are measured again, so often at most.
UNSTEADY, MOST_SETS = 1.05, 3
#: Groups whose outputs are waited for, to tell the latency.
MOST_WAITED = 32
#: After a burst a random piece of each output, of so many elements, is compared with what is right;
#: after the two bursts of one round, everything.
PIECE = 1 << 20


@dataclass
class Ring:
    """The slots of one shape: inputs in the judge's buffers, what is right, where to look."""

    rig: Rig
    timed: Timed
    slots: list[Call]
    expected: list[list[np.ndarray]] = field(default_factory=list)
    #: The largest finite value of each output.
    scales: list[list[float]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    #: Arguments that no call has had yet.
    spare: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def group(self) -> int:
        """Calls between two decisions."""
        return max(LEAST_GROUP, int(GROUP_SHARE * len(self.slots)))

    @property
    def placed(self) -> list[Placed]:
        return [place for slot in self.slots for place in slot.placed]

    def poison(self) -> None:
        for slot in self.slots:
            slot.poison_outputs()

    def release(self) -> None:
        for slot in self.slots:
            slot.release()


def make_ring(
    rig: Rig,
    entries: Mapping[str, Entry],
    timed: Timed,
    rng: np.random.Generator,
    least: int = 0,
) -> Ring:
    """The ring of one shape, with at least so many slots."""
    first = timed.make(rng)
    slots = []
    for number in range(slots_of(first, rig.judge.facts["l2"], least)):
        made = first if not number else _varied(first, timed, rng)
        call = Call(rig, entries[timed.entry], made)
        call.write_inputs()
        slots.append(call)
    return Ring(rig, timed, slots)


def slots_of(args: tuple[Any, ...], l2: int, least: int = 0) -> int:
    """How many inputs of this size the ring holds beside a second-level cache of `l2` bytes."""
    size = sum(value.nbytes for value in args if isinstance(value, np.ndarray))
    least = least or (LEAST_LARGE_SLOTS if size >= LARGE else LEAST_SLOTS)
    wanted = math.ceil(RING_OVER_CACHE * l2 / max(1, size))
    return min(MOST_SLOTS, max(least, wanted))


def _varied(first: tuple[Any, ...], timed: Timed, rng: np.random.Generator) -> tuple[Any, ...]:
    """Arguments of the same kind: made anew, or, where that takes long, with rows moved on."""
    arrays = [value for value in first if isinstance(value, np.ndarray)]
    rows = len(arrays[0])
    if sum(value.size for value in arrays) < _MADE_ANEW or rows < MOST_SLOTS:
        return timed.make(rng)
    step = int(rng.integers(1, rows))
    moves = [isinstance(value, np.ndarray) and len(value) == rows for value in first]
    return tuple(
        np.roll(value, step, axis=0) if moved else value
        for value, moved in zip(first, moves, strict=True)
    )


def learn(ring: Ring, gold: GpuSubmission) -> None:
    """Has the gold solution answer every slot: what is right, and the elements that decide."""
    for slot in ring.slots:
        slot.poison_outputs()
        gold.tell({"op": "call", "entry": ring.timed.entry, "values": slot.nodes}, slot.placed)
        right = slot.read_written()[: len(slot.outputs)]
        scales = [_scale(a, p.dtype) for a, p in zip(right, slot.outputs, strict=True)]
        ring.expected.append(right)
        ring.scales.append(scales)
        ring.probes.append(_probe(slot, right, scales, ring.timed.tolerance))


def _values(array: np.ndarray, dtype: str) -> np.ndarray:
    return widen(array) if dtype == "bfloat16" else array


def _scale(stored: np.ndarray, dtype: str) -> float:
    """The largest finite value."""
    if dtype == "bfloat16":
        sizes, infinite = stored & np.uint16(0x7FFF), np.uint16(0x7F80)
        largest = sizes.max(initial=0)
        if largest >= infinite:
            largest = sizes[sizes < infinite].max(initial=0)
        return float(widen(np.asarray([largest], np.uint16))[0])
    sizes = np.abs(stored)
    largest = sizes.max(initial=0)
    if not np.isfinite(largest):
        largest = sizes[np.isfinite(sizes)].max(initial=0)
    return float(largest)


def _probe(
    slot: Call, right: list[np.ndarray], scales: list[float], tolerance: float
) -> dict[str, Any]:
    """One element of one output, and a threshold far from its right value on either side."""
    number = random.randrange(len(slot.outputs))
    place = slot.outputs[number]
    stored = right[number].reshape(-1)
    where = random.randrange(stored.size)
    value = float(_values(stored[where : where + 1], place.dtype)[0])
    distance = max(8 * tolerance * scales[number], 0.5 * abs(value), 1e-6)
    above = random.random() < 0.5
    item = STORED[place.dtype].itemsize
    return {
        "buffer": place.buffer.number,
        "offset": place.offset + where * item,
        "dtype": place.dtype,
        "size": item,
        "threshold": value - distance if above else value + distance,
        "above": above,
    }


@dataclass
class Times:
    """Seconds of one call, by round; whether calls were replayed from graphs.

    `latency` is the time of one call whose output is waited for.
    """

    mode: str
    seconds: list[float]
    latency: float

    @property
    def best(self) -> float:
        return median(self.seconds)


class Clock:
    """Times one answer on one ring."""

    def __init__(self, ring: Ring, answer: GpuSubmission, *, graphs: bool = True) -> None:
        self.ring, self.answer = ring, answer
        self._number = random.getrandbits(30)
        hidden = ("above",)
        probes = [{k: v for k, v in p.items() if k not in hidden} for p in ring.probes]
        ring.poison()
        reply = self.tell(
            entry=ring.timed.entry,
            slots=[slot.nodes for slot in ring.slots],
            probes=probes,
            group=ring.group,
            graphs=graphs,
        )
        self.mode = str(reply.get("mode"))

    def tell(self, **order: Any) -> dict[str, Any]:
        """Has the runner prepare or run this burst."""
        header = {"op": "burst", "number": self._number, **order}
        return self.answer.tell(header, self.ring.placed)

    def burst(self, groups: int, patience: int = LAG, *, whole: bool = False) -> float:
        """Seconds that so many groups took; what they wrote is checked, in part or as a whole."""
        count = len(self.ring.slots)
        start = random.randrange(count)
        table = [random.sample(range(count), 2) for _ in range(count)]
        self.ring.poison()
        begun = time.perf_counter()
        reply = self.tell(start=start, table=table, groups=groups, patience=patience)
        seconds = time.perf_counter() - begun
        path = self._path(start, table, groups, patience)
        if reply.get("path") != path:
            raise Violation("a timed call wrote a wrong output: the calls took another path")
        with self.answer.frozen():
            self._check(random.choice(path), whole)
        return seconds

    def _path(self, start: int, table: list[list[int]], groups: int, patience: int) -> list[int]:
        """The slots with which the groups begin if every output is right."""
        path: list[int] = []
        for number in range(groups):
            above = 0
            if number >= patience:
                decided = (path[number - patience] + self.ring.group - 1) % len(self.ring.slots)
                above = int(self.ring.probes[decided]["above"])
            path.append(table[path[-1]][above] if path else start)
        return path

    def _check(self, start: int, whole: bool) -> None:
        """A slot of the group that began with this one."""
        chosen = (start + random.randrange(self.ring.group)) % len(self.ring.slots)
        slot, right = self.ring.slots[chosen], self.ring.expected[chosen]
        scales = self.ring.scales[chosen]
        for place, stored, scale in zip(slot.outputs, right, scales, strict=True):
            want = stored.reshape(-1)
            count = want.size if whole else min(want.size, PIECE)
            first = random.randrange(want.size - count + 1)
            got = slot.read_piece(place, first, count)
            _same(got, want[first : first + count], place.dtype, scale, self.ring.timed)

    def times(self, rounds: int = ROUNDS) -> Times:
        rough = self.burst(SHORT + LEAST_GROUPS) / (SHORT + LEAST_GROUPS)
        extra = min(MOST_GROUPS, max(LEAST_GROUPS, math.ceil(BURST_SECONDS / rough)))
        found = [self._rounds(rounds, extra)]
        # What disturbs a time is over after a second or two.
        while max(found[-1]) > UNSTEADY * min(found[-1]) and len(found) < MOST_SETS:
            found.append(self._rounds(rounds, extra))
        seconds = min(found, key=lambda seconds: max(seconds) - min(seconds))
        waited = self._slope(min(extra, MOST_WAITED), patience=1)
        others = (self.ring.group - 1) * median(seconds)
        return Times(self.mode, seconds, max(waited - others, median(seconds)))

    def _rounds(self, rounds: int, extra: int) -> list[float]:
        """Seconds of a call, by round."""
        # Of our own code a piece of each burst's outputs is enough.
        looked_at = -1 if self.answer.ours else random.randrange(rounds)
        return [
            self._slope(extra, whole=turn == looked_at) / self.ring.group for turn in range(rounds)
        ]

    def _slope(self, extra: int, patience: int = LAG, *, whole: bool = False) -> float:
        """Seconds of a group: between a short burst and one with so many groups more."""
        order = [SHORT, SHORT + extra]
        random.shuffle(order)
        taken = {groups: self.burst(groups, patience, whole=whole) for groups in order}
        slope = (taken[SHORT + extra] - taken[SHORT]) / extra
        return max(slope, LEAST_SHARE * taken[SHORT + extra] / (SHORT + extra))


def compare(slot: Call, got: list[np.ndarray], right: list[np.ndarray], timed: Timed) -> None:
    """Every element of every output."""
    for place, mine, want in zip(slot.outputs, got, right, strict=False):
        _same(mine, want, place.dtype, _scale(want, place.dtype), timed)


def _same(got: np.ndarray, want: np.ndarray, dtype: str, scale: float, timed: Timed) -> None:
    """Within the timed shape's tolerance of the gold solution's output."""
    if got.tobytes() == want.tobytes():
        return
    if want.dtype.kind in "biu" and dtype != "bfloat16":
        wrong = got != want
    else:
        a, b = _values(got, dtype).astype(np.float32), _values(want, dtype).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(a - b) <= timed.tolerance * scale
            if near.all():
                return
        wrong = ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    # A tie between equal values may be broken another way in a few places.
    most = 1e-3 * wrong.size if dtype in ("int32", "int64", "uint8", "bool") else 0
    if np.count_nonzero(wrong) > most:
        raise Violation(
            f"a timed call of {timed.name} wrote {np.count_nonzero(wrong)} wrong elements "
            f"of {wrong.size}"
        )
