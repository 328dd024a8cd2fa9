"""What times on a GPU are compared with: the speed of light, torch's best, the gold solution.

None of it depends on an answer, so that a run measures it once: what this process measured, or was
told by `recall`, it does not measure again.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError, Violation
from trapline.arena.gpu import turns
from trapline.arena.gpu.contract import Entry, Output, Timed, bfloat16, dtype_name, entries
from trapline.arena.gpu.rig import GpuSubmission, Rig
from trapline.arena.gpu.timing import Clock, Ring, learn, make_ring
from trapline.arena.process.session import SandboxConfig

LIGHTS = Path(__file__).with_name("lights")
#: Rounds of a time that no score of an answer is.
ROUNDS = 3
_ELEMENTS, _SIDE = 1 << 25, 8192
_LIGHT_ENTRIES = {
    "copy": Entry(lambda source: (Output(source.shape, "float32"),)),
    "read": Entry(lambda source: (Output((-(-source.size // (4096 * 8)),), "float32"),)),
    "matmul": Entry(lambda a, b: (Output((a.shape[0], b.shape[1]), dtype_name(a)),)),
}
#: `lights` → kind → work a second; `runner` → bytes; a challenge's digest → shape → `Known`.
_known: dict[str, Any] = {}


#: Seconds of a call on one shape: torch's best with its name, such as `compiled`, and the gold
#: solution's.
Known = TypedDict("Known", {"baseline": float, "baseline name": str, "gold": float})


def known() -> dict[str, Any]:
    """Everything that is known, as JSON."""
    return dict(_known)


def recall(facts: Mapping[str, Any]) -> None:
    """What was measured earlier in the same run, on the same GPU."""
    _known.update(facts)


def ours(
    folder: Path, config: SandboxConfig, contract: Mapping[str, Entry], rig: Rig
) -> GpuSubmission:
    """Code of ours in a runner; it takes no turns by itself."""
    return GpuSubmission(folder, config, contract, rig, ours=True)


def learned(
    rig: Rig,
    contract: Mapping[str, Entry],
    shapes: Sequence[Timed],
    gold: GpuSubmission,
    *,
    least: int = 0,
    spare: bool = False,
) -> list[Ring]:
    """Rings of these shapes, answered by the gold solution; `spare`: with inputs kept back."""
    rng, rings = np.random.default_rng(), []
    for timed in shapes:
        ring = make_ring(rig, contract, timed, rng, least)
        learn(ring, gold)
        ring.spare = [timed.make(rng) for _ in range(ring.group if spare else 0)]
        rings.append(ring)
    return rings


class Lights:
    """What this GPU reaches today."""

    def __init__(self, found: Mapping[str, float]) -> None:
        self.rates = dict(found)

    def seconds(self, light: Mapping[str, float]) -> float:
        """The least time that this work takes."""
        moved = light.get("read", 0.0) + light.get("write", 0.0)
        rate = self.rates["copy"] if light.get("write", 0.0) else self.rates["read"]
        times = [moved / rate]
        times += [
            light[kind] / self.rates[kind] for kind in ("bfloat16", "float32") if kind in light
        ]
        return max(times)


def lights(config: SandboxConfig, rig: Rig) -> Lights:
    if "lights" not in _known:
        small = rig.device == "cpu"
        specs = _light_shapes(1 << 18 if small else _ELEMENTS, 128 if small else _SIDE)
        with ours(LIGHTS, config, _LIGHT_ENTRIES, rig) as answer:
            with turns.beside(rig.gpu):
                # The ring need not be long, only larger than the cache.
                shapes = [timed for timed, _ in specs]
                rings = learned(rig, _LIGHT_ENTRIES, shapes, answer, least=2)
            with turns.alone(rig.gpu):
                times = [Clock(ring, answer).times(ROUNDS) for ring in rings]
                answer.close()
        _known["lights"] = {
            timed.name: work / min(found.seconds)
            for (timed, work), found in zip(specs, times, strict=True)
        }
        _release(rings)
    return Lights(_known["lights"])


def runner_bytes(config: SandboxConfig, rig: Rig) -> int:
    """GPU memory that a runner takes before an answer does anything."""
    if "runner" not in _known:
        with turns.alone(rig.gpu), ours(LIGHTS, config, _LIGHT_ENTRIES, rig) as runner:
            free = rig.judge.ask("free_bytes")
            runner.start(())
            _known["runner"] = free - rig.judge.ask("free_bytes")
    found: int = _known["runner"]
    return found


def _release(rings: Sequence[Ring]) -> None:
    for ring in rings:
        ring.release()


def _noise(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """A block of random numbers, repeated."""
    block = rng.standard_normal(1 << 16, dtype=np.float32)
    return np.resize(block, shape)


def _light_shapes(size: int, side: int) -> list[tuple[Timed, float]]:
    """What is timed, and the work of one call: bytes or operations."""
    flops = 2.0 * side**3

    def matrices(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return _noise(rng, side, side), _noise(rng, side, side)

    def rounded(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(bfloat16(matrix) for matrix in matrices(rng))

    return [
        (Timed("copy", "copy", lambda rng: (_noise(rng, size),), {}), 8.0 * size),
        (Timed("read", "read", lambda rng: (_noise(rng, size),), {}), 4.0 * size),
        (Timed("bfloat16", "matmul", rounded, {}), flops),
        (Timed("float32", "matmul", matrices, {}), flops),
    ]


def of_challenge(
    challenge: Challenge,
    config: SandboxConfig,
    rig: Rig,
    before: Callable[[], None] = lambda: None,
) -> dict[str, Known]:
    """By the names of the challenge's timed shapes; `before` runs in the turn that prepares."""
    if challenge.digest in _known:
        before()
    else:
        try:
            _known[challenge.digest] = _Race(challenge, config, rig).run(before)
        except Violation as failure:
            raise ArenaError(f"the gold solution of {challenge.id} failed: {failure}") from None
    found: dict[str, Known] = _known[challenge.digest]
    return found


class _Race:
    """The gold solution and torch on the shapes of one challenge."""

    def __init__(self, challenge: Challenge, config: SandboxConfig, rig: Rig) -> None:
        self.challenge, self.rig = challenge, rig
        self.entries = entries(challenge.module("cases"))
        self.gold = ours(challenge.solution, config, self.entries, rig)
        self.baselines = {
            folder.name: ours(folder, config, self.entries, rig)
            for folder in sorted((challenge.folder / "baselines").iterdir())
            if folder.is_dir() and not folder.name.startswith("_")
        }
        #: Why a baseline takes no part, such as a library that this torch lacks.
        self.failures: list[str] = []

    def run(self, before: Callable[[], None]) -> dict[str, Known]:
        with ExitStack() as stack:
            for one in (self.gold, *self.baselines.values()):
                stack.enter_context(one)
            with turns.beside(self.rig.gpu):
                before()
                shapes = self.challenge.module("cases").timed()
                rings = learned(self.rig, self.entries, shapes, self.gold)
                stack.callback(_release, rings)
                able = self._able(rings)
            with turns.alone(self.rig.gpu):
                found = {
                    ring.timed.name: self._known(ring, able[ring.timed.name]) for ring in rings
                }
                stack.close()  # GPU memory must not change while another cell has its turn
                return found

    def _able(self, rings: Sequence[Ring]) -> dict[str, list[str]]:
        """The baselines that answer, by shape. They start and compile side by side."""
        with ThreadPoolExecutor(len(self.baselines)) as pool:
            answered = list(pool.map(lambda name: self._answered(name, rings), self.baselines))
        return {
            ring.timed.name: [
                name
                for name, shapes in zip(self.baselines, answered, strict=True)
                if ring.timed.name in shapes
            ]
            for ring in rings
        }

    def _answered(self, name: str, rings: Sequence[Ring]) -> list[str]:
        """The shapes that this baseline answers; the first call may compile."""
        shapes = []
        for ring in rings:
            slot = ring.slots[0]
            order = {"op": "call", "entry": ring.timed.entry, "values": slot.nodes}
            try:
                self.baselines[name].tell(order, slot.placed)
            except Violation as failure:
                self.failures.append(f"{name}: {failure}")
            else:
                shapes.append(ring.timed.name)
        return shapes

    def _known(self, ring: Ring, able: list[str]) -> Known:
        own, times = Clock(ring, self.gold).times(ROUNDS).best, {}
        for name in able:
            try:
                times[name] = Clock(ring, self.baselines[name]).times(ROUNDS).best
            except Violation as failure:
                self.failures.append(f"{name}: {failure}")
        if not times:
            reasons = "; ".join(self.failures)
            raise ArenaError(f"no baseline of {self.challenge.id} runs: {reasons}")
        best = min(times, key=times.__getitem__)
        return {"baseline": times[best], "baseline name": best, "gold": own}
