"""Speed and memory of GPU answers: against what the chip can do, and against torch."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trapline.arena.challenge import Challenge
from trapline.arena.errors import Violation
from trapline.arena.gpu import nvml, turns, yardsticks
from trapline.arena.gpu.contract import Timed, entries
from trapline.arena.gpu.fresh_inputs import refuse_remembered
from trapline.arena.gpu.rig import GpuSubmission
from trapline.arena.gpu.timing import Clock, Ring, Times
from trapline.arena.gpu.yardsticks import Known, learned, ours
from trapline.arena.record import Dimension

#: A time this far below the speed of light is a mistake or a cheat, not a time.
IMPOSSIBLE = 0.9
#: Memory this many times as large as what is free of charge is worth nothing.
USELESS_MEMORY = 32.0
#: Two runners of the same kind may differ by so much.
HELD_SLACK = 32 << 20
SAMPLE_SECONDS = 0.0005
#: Slots whose calls are profiled; kernels that are named, and characters of a name.
PROFILED, MOST_KERNELS, LONGEST_NAME = 4, 12, 160
#: Kinds of operations in a shape's `light`.
OPERATIONS = ("bfloat16", "float32", "vector")


def score(seconds: float, light: float, baseline: float) -> float:
    """1 at the speed of light, 0.5 at torch's best, falling with the time beyond it."""
    if baseline <= light:
        return min(1.0, light / seconds)
    if seconds >= baseline:
        return 0.5 * baseline / seconds
    return min(1.0, 0.5 + 0.5 * (baseline - seconds) / (baseline - light))


@dataclass
class Used:
    """What one timed shape took of the GPU."""

    timed: Timed
    times: Times
    #: Bytes beyond inputs and outputs: at import and during the first call, and since then, graphs
    #: included.
    peak: int
    growth: int
    #: Right after the timing.
    clocks: dict[str, int]
    #: Seconds of a call on inputs that it has not seen, at least.
    fresh: float = 0.0


class Measurer:
    """Measures one answer on the timed shapes of its challenge."""

    def __init__(self, challenge: Challenge, answer: GpuSubmission) -> None:
        self.challenge, self.answer, self.rig = challenge, answer, answer.rig
        self.entries = entries(challenge.module("cases"))
        self.shapes: list[Timed] = challenge.module("cases").timed()

    def measure(self) -> tuple[dict[str, Dimension], dict[str, Any]]:
        config, gpu = self.answer.config, self.rig.gpu
        with ours(self.challenge.solution, config, self.entries, self.rig) as gold:
            with turns.beside(gpu):  # directly after the checks: no timing comes in between
                self.answer.close()  # it must not run beside what it is compared with
                self.rig.trim()
                rings = learned(self.rig, self.entries, self.shapes, gold, spare=True)
                kernels = self._kernels(rings)
            try:
                found = yardsticks.lights(config, self.rig)
                known = yardsticks.of_challenge(self.challenge, config, self.rig)
                runner = yardsticks.runner_bytes(config, self.rig)
                with turns.alone(gpu):
                    mine = self._answer(rings, gold, runner)
                    gold.close()  # now: else another cell's free memory would grow
            finally:
                for ring in rings:
                    ring.release()
        rows = [
            _row(used, found.seconds(used.timed.light), known[used.timed.name], names)
            for used, names in zip(mine, kernels, strict=True)
        ]
        total = 100.0 * sum(row["score"] for row in rows) / len(rows)
        ratio = math.prod(row["baseline"] / row["seconds"] for row in rows) ** (1 / len(rows))
        reason = f"{ratio:.2f} times as fast as torch's best, over {len(rows)} shapes"
        raw = {"shapes": rows, "lights": found.rates}
        return {
            "speed": Dimension(score=round(total, 1), reason=reason, evidence=raw),
            "memory": _memory(mine),
        }, raw

    def _answer(self, rings: list[Ring], gold: GpuSubmission, runner: int) -> list[Used]:
        """The answer's times, and the memory that it took."""
        found = []
        with self.answer.fresh() as answer:
            assert isinstance(answer, GpuSubmission)
            held = self._held(answer, runner)
            for ring in rings:
                first = ring.slots[0]
                order = {"op": "call", "entry": ring.timed.entry, "values": first.nodes}
                first.poison_outputs()
                with self._watched() as peak:
                    answer.tell(order, first.placed)
                before = self.rig.judge.ask("free_bytes")
                clock = Clock(ring, answer)
                times, clocks = clock.times(), nvml.state()
                growth = max(0, before - self.rig.judge.ask("free_bytes"))
                fresh = refuse_remembered(clock, gold, times)
                found.append(Used(ring.timed, times, held + peak[0], growth, clocks, fresh))
        return found

    def _kernels(self, rings: list[Ring]) -> list[dict[str, float]]:
        """What the answer's kernels are called, by ring. The profiler takes seconds to start, so
        it has a process of its own, beside other cells' checks."""
        profiled = self.answer.fresh()
        with profiled:
            found = [_kernels(ring, profiled) for ring in rings]
        for ring in rings:
            for slot in ring.slots[:PROFILED]:
                slot.write_inputs()  # the timed process finds nothing that this one left
        return found

    def _held(self, answer: GpuSubmission, runner: int) -> int:
        """GPU memory that the answer takes when it is imported, beyond what a runner takes."""
        free: int = self.rig.judge.ask("free_bytes")
        answer.start(())
        taken: int = free - self.rig.judge.ask("free_bytes")
        return max(0, taken - runner - HELD_SLACK)

    @contextmanager
    def _watched(self) -> Iterator[list[int]]:
        """The most GPU memory that was taken beyond what was in use before."""
        peak, stop = [0], threading.Event()
        before = self.rig.judge.ask("free_bytes")

        def look() -> None:
            while not stop.is_set():
                peak[0] = max(peak[0], before - self.rig.judge.ask("free_bytes"))
                time.sleep(SAMPLE_SECONDS)

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield peak
        finally:
            stop.set()
            watcher.join()
            peak[0] = max(peak[0], before - self.rig.judge.ask("free_bytes"))


def _kernels(ring: Ring, answer: GpuSubmission) -> dict[str, float]:
    """Shares of the GPU's time by kernel, as the answer's own process reports them: a label."""
    slots = ring.slots[:PROFILED]
    header = {
        "op": "kernels",
        "entry": ring.timed.entry,
        "slots": [slot.nodes for slot in slots],
    }
    try:
        reply = answer.tell(header, [place for slot in slots for place in slot.placed])
    except Violation:
        return {}
    said = reply.get("kernels")
    return shares(said) if isinstance(said, dict) else {}


def shares(microseconds: Mapping[Any, Any]) -> dict[str, float]:
    """The longest kernels with their share of the sum; other values than times are left out."""
    known = {
        str(name)[:LONGEST_NAME]: float(value)
        for name, value in microseconds.items()
        if isinstance(value, int | float) and 0 < value < math.inf
    }
    total = sum(known.values())
    longest = sorted(known.items(), key=lambda item: (-item[1], item[0]))[:MOST_KERNELS]
    return {name: round(value / total, 4) for name, value in longest}


def _row(used: Used, light: float, known: Known, kernels: Mapping[str, float]) -> dict[str, Any]:
    timed, mine = used.timed, used.times
    if mine.best < IMPOSSIBLE * light:
        raise Violation(
            f"{timed.name} took {mine.best * 1e6:.1f} µs, where {light * 1e6:.1f} µs is the least "
            "that this GPU needs for the bytes and operations"
        )
    return {
        "shape": timed.name,
        "seconds": mine.best,
        "rounds": mine.seconds,
        "latency": mine.latency,
        "fresh": used.fresh,
        "mode": mine.mode,
        "light": light,
        **known,
        "score": score(mine.best, light, known["baseline"]),
        "bytes": sum(timed.light.get(kind, 0.0) for kind in ("read", "write")),
        "operations": sum(timed.light.get(kind, 0.0) for kind in OPERATIONS),
        "clocks": used.clocks,
        "kernels": kernels,
    }


def _memory(measured: list[Used]) -> Dimension:
    points, words = [], []
    for used in measured:
        excess = max(1.0, used.peak / max(1, used.timed.workspace))
        points.append(max(0.0, 1.0 - math.log(excess) / math.log(USELESS_MEMORY)))
        words.append(f"{used.peak / 2**20:.0f} MiB for {used.timed.name}")
    evidence = {
        "peak": {used.timed.name: used.peak for used in measured},
        "growth over all timed calls": {used.timed.name: used.growth for used in measured},
    }
    reason = "beyond inputs and outputs: " + ", ".join(words)
    return Dimension(score=round(100 * min(points), 1), reason=reason, evidence=evidence)
