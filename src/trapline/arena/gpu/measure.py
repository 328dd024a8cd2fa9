"""Speed and memory of GPU answers: against what the chip can do, and against torch."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError, Violation
from trapline.arena.gpu import nvml
from trapline.arena.gpu.contract import Entry, Output, Timed, bfloat16, entries
from trapline.arena.gpu.fresh_inputs import refuse_remembered
from trapline.arena.gpu.opening import shared_rig
from trapline.arena.gpu.rig import GpuSubmission
from trapline.arena.gpu.timing import Clock, Ring, Times, learn, make_ring, rates
from trapline.arena.process.session import SandboxConfig
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
#: Challenge digest → shape → times and name of the fastest baseline.
_BASELINES: dict[str, dict[str, tuple[Times, str]]] = {}
LIGHTS = Path(__file__).with_name("lights")
_ELEMENTS, _SIDE = 1 << 25, 8192


_LIGHT_ENTRIES = {
    "copy": Entry(lambda source: (Output(source.shape, "float32"),)),
    "read": Entry(lambda source: (Output((-(-source.size // (4096 * 8)),), "float32"),)),
    "matmul": Entry(lambda a, b: (Output((a.shape[0], b.shape[1]), _kind(a)),)),
}


def _kind(array: np.ndarray) -> str:
    return "bfloat16" if type(array).__name__ == "BFloat16" else "float32"


def _noise(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """A block of random numbers, repeated."""
    block = rng.standard_normal(1 << 16, dtype=np.float32)
    return np.resize(block, shape)


def _light_shapes(size: int, side: int) -> list[tuple[Timed, float]]:
    """What is timed, and the work of one call: bytes or operations."""
    flops = 2.0 * side**3
    return [
        (Timed("copy", "copy", lambda rng: (_noise(rng, size),), {}), 8.0 * size),
        (Timed("read", "read", lambda rng: (_noise(rng, size),), {}), 4.0 * size),
        (
            Timed(
                "bfloat16",
                "matmul",
                lambda rng: (bfloat16(_noise(rng, side, side)), bfloat16(_noise(rng, side, side))),
                {},
            ),
            flops,
        ),
        (
            Timed(
                "float32",
                "matmul",
                lambda rng: (_noise(rng, side, side), _noise(rng, side, side)),
                {},
            ),
            flops,
        ),
    ]


class Lights:
    """What this GPU reaches today; measured once by each grading process."""

    def __init__(self, found: dict[str, float]) -> None:
        self.rates = found

    def seconds(self, light: Mapping[str, float]) -> float:
        """The least time that this work takes."""
        moved = light.get("read", 0.0) + light.get("write", 0.0)
        rate = self.rates["copy"] if light.get("write", 0.0) else self.rates["read"]
        times = [moved / rate]
        times += [
            light[kind] / self.rates[kind] for kind in ("bfloat16", "float32") if kind in light
        ]
        return max(times)


@cache
def lights(config: SandboxConfig) -> Lights:
    rig, small = shared_rig(config.device), config.device == "cpu"
    specs = _light_shapes(1 << 18 if small else _ELEMENTS, 128 if small else _SIDE)
    with GpuSubmission(LIGHTS, config, _LIGHT_ENTRIES, rig) as answer:
        return Lights(rates(rig, answer, specs))


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
    #: Name → share of the GPU's time.
    kernels: dict[str, float] = field(default_factory=dict)


class Measurer:
    """Measures one answer on the timed shapes of its challenge."""

    def __init__(self, challenge: Challenge, answer: GpuSubmission) -> None:
        self.challenge, self.answer, self.rig = challenge, answer, answer.rig
        self.entries = entries(challenge.module("cases"))
        self.shapes: list[Timed] = challenge.module("cases").timed()

    def _of(self, folder: Path) -> GpuSubmission:
        return GpuSubmission(folder, self.answer.config, self.entries, self.rig)

    def measure(self) -> tuple[dict[str, Dimension], dict[str, Any]]:
        self.answer.close()  # it must not run beside what it is compared with
        found = lights(self.answer.config)
        rng = np.random.default_rng()
        rings = [make_ring(self.rig, self.entries, timed, rng) for timed in self.shapes]
        try:
            right = self._gold(rings)
            baselines = self._baselines(rings)
            mine = self._answer(rings)
        finally:
            for ring in rings:
                ring.release()
        rows = [
            _row(used, found.seconds(used.timed.light), baselines[used.timed.name], gold)
            for used, gold in zip(mine, right, strict=True)
        ]
        total = 100.0 * sum(row["score"] for row in rows) / len(rows)
        ratio = math.prod(row["baseline"] / row["seconds"] for row in rows) ** (1 / len(rows))
        reason = f"{ratio:.2f} times as fast as torch's best, over {len(rows)} shapes"
        raw = {"shapes": rows, "lights": found.rates}
        return {
            "speed": Dimension(score=round(total, 1), reason=reason, evidence=raw),
            "memory": _memory(mine),
        }, raw

    def _gold(self, rings: list[Ring]) -> list[Times]:
        """What is right on every ring, and the gold solution's times."""
        times = []
        with self._of(self.challenge.solution) as gold:
            for ring in rings:
                learn(ring, gold)
                times.append(Clock(ring, gold).times(3))
        return times

    def _baselines(self, rings: list[Ring]) -> dict[str, tuple[Times, str]]:
        """Torch's best by shape; measured once by each grading process."""
        known = _BASELINES.setdefault(self.challenge.digest, {})
        if not known:
            failures: list[str] = []
            for folder in sorted((self.challenge.folder / "baselines").iterdir()):
                if folder.is_dir() and not folder.name.startswith("_"):
                    self._time_baseline(folder, rings, known, failures)
            if any(ring.timed.name not in known for ring in rings):
                raise ArenaError(f"no baseline of {self.challenge.id} runs: {'; '.join(failures)}")
        return known

    def _time_baseline(
        self,
        folder: Path,
        rings: list[Ring],
        known: dict[str, tuple[Times, str]],
        failures: list[str],
    ) -> None:
        """Notes the baseline's times of the shapes on which it is the fastest so far."""
        with self._of(folder) as baseline:
            for ring in rings:
                try:
                    times = Clock(ring, baseline).times(3)
                except Violation as failure:  # such as a library that this torch lacks
                    failures.append(f"{folder.name}: {failure}")
                    continue
                best = known.get(ring.timed.name)
                if best is None or times.best < best[0].best:
                    known[ring.timed.name] = times, folder.name

    def _answer(self, rings: list[Ring]) -> list[Used]:
        """The answer's times, the memory that it took, and what its kernels are called."""
        found = []
        with self.answer.fresh() as answer, self._of(self.challenge.solution) as gold:
            assert isinstance(answer, GpuSubmission)
            held = self._held(gold, answer)
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
            for used, ring in zip(found, rings, strict=True):
                used.kernels = _kernels(ring, answer)
        return found

    def _held(self, gold: GpuSubmission, answer: GpuSubmission) -> int:
        """GPU memory that the answer takes when it is imported, beyond what a runner takes."""
        free: list[int] = [self.rig.judge.ask("free_bytes")]
        for one in (gold, answer):
            one.start(())
            free.append(self.rig.judge.ask("free_bytes"))
        return max(0, free[1] - free[2] - (free[0] - free[1]) - HELD_SLACK)

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


def _row(used: Used, light: float, baseline: tuple[Times, str], gold: Times) -> dict[str, Any]:
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
        "baseline": baseline[0].best,
        "baseline name": baseline[1],
        "gold": gold.best,
        "score": score(mine.best, light, baseline[0].best),
        "bytes": sum(timed.light.get(kind, 0.0) for kind in ("read", "write")),
        "operations": sum(timed.light.get(kind, 0.0) for kind in OPERATIONS),
        "clocks": used.clocks,
        "kernels": used.kernels,
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
