"""Measures from outside: precision, time and memory, on our clock and by the kernel's figures."""

import fcntl
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.challenge import Challenge, MemoryPlan, SpeedPlan
from trapline.arena.errors import NotMeasuredError, Violation
from trapline.arena.judge.traps import Call, Precision
from trapline.arena.process.proxy import Submission, TimedCall
from trapline.arena.record import Dimension

BURSTS = (1, 4)
#: A call costs at least this share of what a call in a long burst takes on average.
LEAST_SHARE = 0.75
QUICK_ROUNDS = 3
FULL_ROUNDS = 7
#: The two fastest bursts of a kind differ by this share at most, or further rounds are run: up to
#: so many times the planned ones.
SETTLED_SPREAD = 0.03
MOST_ROUNDS = 3
#: The most that counts as noise of the machine; it is read off the reference alone.
MOST_NOISE = 0.1
#: Errors up to twice a careful implementation's score 100; a thousand times its error, 0.
PRECISE_RATIO, USELESS_RATIO = 2.0, 1000.0
#: Growth this much faster than allowed is worth nothing.
EXPONENT_MARGIN = 0.8
#: What a process may hold between calls beyond what the reference does. Memory that is let go in a
#: call makes room for as much that no peak shows, so it must be little.
IDLE_ALLOWANCE = 32 << 20
#: Below this, allocators and page sizes say more than the algorithm.
MEMORY_FLOOR = 256 << 10


def precision(challenge: Challenge, submission: Submission, rng: np.random.Generator) -> Dimension:
    """The largest error against float64, in units of a careful implementation's."""
    samples: list[Precision] = challenge.module("cases").precision(submission, rng)
    ratios = [_error_ratio(sample) for sample in samples]
    worst = max(ratios)
    score = _log_score(worst, best=PRECISE_RATIO, worst=USELESS_RATIO)
    reason = f"largest error is {worst:.3g} times that of a careful implementation"
    return Dimension(score=score, reason=reason, evidence={"ratios": ratios})


def _error_ratio(sample: Precision) -> float:
    got = np.asarray(sample.got)
    if got.shape != sample.exact.shape or got.dtype != sample.careful.dtype:
        raise Violation(f"an answer {got.dtype}{list(got.shape)} where precision was measured")
    error, careful = (
        float(np.max(np.abs(value.astype(np.float64) - sample.exact), initial=0.0))
        for value in (got, sample.careful)
    )
    scale = float(np.max(np.abs(sample.exact), initial=0.0))
    floor = max(careful, float(np.finfo(sample.careful.dtype).eps) * scale / 2, 1e-300)
    return error / floor if math.isfinite(error) else math.inf


def speed(
    challenge: Challenge,
    submission: Submission,
    reference: Submission,
    rng: np.random.Generator,
    rounds: int,
) -> tuple[Dimension, dict[str, Any]]:
    """Reference time over submission time, both as the slope between short and long bursts."""
    prepare = challenge.module("cases").speed
    plan = challenge.plan.speed or SpeedPlan()
    racers = {"reference": reference, "submission": submission}
    timings: dict[str, dict[int, list[float]]] = {name: {n: [] for n in BURSTS} for name in racers}
    fastest: dict[tuple[str, int], Burst] = {}
    digests: list[str] = []
    with quiet():
        for name, racer in racers.items():
            with _blamed(name):
                _burst(racer, prepare, rng, 1).check()
        done = 0
        while order := _due(timings, done, rounds):
            done += 1
            for index in rng.permutation(len(order)):
                name, n = order[index]
                others = [racer for other, racer in racers.items() if other != name]
                with paused(others), _blamed(name):
                    burst = _burst(racers[name], prepare, rng, n)
                timings[name][n].append(burst.seconds)
                digests += burst.digests
                if burst.seconds == min(timings[name][n]):
                    fastest[name, n] = burst
    # Only the fastest bursts decide, so only skipped work in them would pay: all of it is checked.
    for (name, _), burst in fastest.items():
        with _blamed(name):
            burst.check()
    slopes = {name: _slope(bursts) for name, bursts in timings.items()}
    ratio = slopes["reference"] / slopes["submission"]
    noise = float(np.clip(spread({"reference": timings["reference"]}), SETTLED_SPREAD, MOST_NOISE))
    # A ratio that noise explains is that of the reference with itself.
    judged = 1.0 if abs(math.log(ratio)) <= noise else ratio
    score = _log_score(plan.full_marks_at / judged, best=1.0, worst=10.0)
    evidence: dict[str, Any] = {
        "ratio": round(ratio, 4),
        "noise": round(noise, 4),
        "milliseconds": _milliseconds(slopes),
        "rounds": done,
    }
    if operations := getattr(challenge.module("cases"), "OPERATIONS", 0):
        evidence["operations"] = operations
    raw = {"timings": timings, "digests": digests}
    reason = f"{ratio:.2f} times the speed of the reference"
    return Dimension(score=score, reason=reason, evidence=evidence), raw


def _due(
    timings: dict[str, dict[int, list[float]]], done: int, rounds: int
) -> list[tuple[str, int]]:
    """The bursts of the next round: all in a planned one, then those that have not settled."""
    if done >= MOST_ROUNDS * rounds:
        return []
    return [
        (name, n)
        for name, bursts in timings.items()
        for n, times in bursts.items()
        if done < rounds or spread({name: {n: times}}) > SETTLED_SPREAD
    ]


def spread(timings: dict[str, dict[int, list[float]]]) -> float:
    """By which share the second fastest burst of a kind is slower than the fastest, at most."""
    fastest = [sorted(times)[:2] for bursts in timings.values() for times in bursts.values()]
    return max((second / first - 1.0 for first, second in fastest), default=math.inf)


@dataclass(frozen=True)
class Burst:
    """Some calls right after another, the answers' digests, and how long it took."""

    calls: list[Call]
    timed: list[TimedCall]
    seconds: float
    digests: list[str]

    def check(self) -> None:
        for call, timed in zip(self.calls, self.timed, strict=True):
            call.check(timed.answer())


def _burst(
    submission: Submission,
    prepare: Callable[[Submission, np.random.Generator], Call],
    rng: np.random.Generator,
    n: int,
) -> Burst:
    """n calls on fresh values; what they answered is committed before the clock stops."""
    calls = [prepare(submission, rng) for _ in range(n)]
    timed = [TimedCall(submission, call.entry, call.args, call.kwargs, call.on) for call in calls]
    started = time.perf_counter()
    digests = [one.run() for one in timed]
    return Burst(calls, timed, time.perf_counter() - started, digests)


def _slope(bursts: dict[int, list[float]]) -> float:
    """Seconds a call: the least disturbed long burst minus the least disturbed short one."""
    short, long = BURSTS
    difference = (min(bursts[long]) - min(bursts[short])) / (long - short)
    # The fixed cost of a call is far below a quarter of it: a larger gap between the bursts means
    # that the short ones were slowed down on purpose.
    return max(difference, LEAST_SHARE * min(bursts[long]) / long, 1e-6)


def _milliseconds(slopes: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds * 1e3, 4) for name, seconds in slopes.items()}


@dataclass(frozen=True)
class Growth:
    sizes: list[int]
    extra_bytes: list[int]
    #: What was in use before each call.
    held_bytes: list[int]
    exponent: float


def memory(
    challenge: Challenge, submission: Submission, reference: Submission, rng: np.random.Generator
) -> tuple[Dimension, dict[str, Any]]:
    """Fits the growth of the kernel's peak figure over the planned sizes."""
    plan = challenge.plan.memory
    assert plan is not None
    with _blamed("reference"):
        usual, _ = _weigh(challenge, reference, rng, plan, plan.sizes[0])
    growth = memory_growth(challenge, submission, rng, plan)
    held = max(growth.held_bytes) - usual
    if held > IDLE_ALLOWANCE:
        raise Violation(f"holds {held >> 20} MB between calls, beyond what the reference does")
    over = growth.exponent - plan.max_exponent
    score = 100.0 * (1.0 - min(1.0, max(0.0, over) / EXPONENT_MARGIN))
    evidence = {
        "exponent": round(growth.exponent, 3),
        "sizes": growth.sizes,
        "extra_bytes": growth.extra_bytes,
        "max_exponent": plan.max_exponent,
    }
    reason = f"peak memory grows as N^{growth.exponent:.2f} (good: N^{plan.max_exponent:g})"
    return Dimension(score=round(score, 1), reason=reason, evidence=evidence), evidence


def memory_growth(
    challenge: Challenge, submission: Submission, rng: np.random.Generator, plan: MemoryPlan
) -> Growth:
    """Peak memory above that before the call, for each size, and the fitted exponent.

    Each size has a process of its own: memory that an allocator keeps from a smaller call serves a
    larger one, which would then seem to allocate less.
    """
    extra, held = [], []
    for size in plan.sizes:
        before, peak = _weigh(challenge, submission, rng, plan, size)
        held.append(before)
        extra.append(max(0, peak - before))
    logs = np.log(np.maximum(extra, MEMORY_FLOOR))
    exponent = float(np.polyfit(np.log(plan.sizes), logs, 1)[0])
    return Growth(plan.sizes, extra, held, exponent)


def _weigh(
    challenge: Challenge,
    submission: Submission,
    rng: np.random.Generator,
    plan: MemoryPlan,
    size: int,
) -> tuple[int, int]:
    """Memory in use before a call of this size, and the most during it, in a process of its own."""
    prepare = challenge.module("cases").memory
    with submission.fresh() as fresh:
        # Small, because what an allocator keeps of it hides as much of the measure.
        warm_up = prepare(fresh, rng, max(1, plan.sizes[0] // 8))
        fresh.call(warm_up.entry, warm_up.args, warm_up.kwargs, on=warm_up.on)
        call = prepare(fresh, rng, size)
        running = fresh.session.running
        running.reset_peak()
        before = running.peak_bytes()
        answer = fresh.call(call.entry, call.args, call.kwargs, on=call.on)
        peak = fresh.session.peak_bytes()
    call.check(answer)
    return before, peak


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """A failure of the reference is ours, not the submission's."""
    try:
        yield
    except Violation as violation:
        if name != "reference":
            raise
        raise NotMeasuredError(f"the reference implementation failed: {violation}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """One timing at a time on this machine, across all graders."""
    path = Path(tempfile.gettempdir(), f"trapline-{os.getuid()}.timing")
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def paused(submissions: list[Submission]) -> Iterator[None]:
    """Pauses submissions that are not being timed, threads and children included."""
    running = [one.session.running for one in submissions]
    for one in running:
        one.pause()
    try:
        yield
    finally:
        for one in running:
            one.resume()


def _log_score(value: float, *, best: float, worst: float) -> float:
    """100 up to `best`, 0 from `worst` on, logarithmic between."""
    if not math.isfinite(value):
        return 0.0
    share = math.log(max(value, best) / best) / math.log(worst / best)
    return round(100.0 * (1.0 - min(1.0, share)), 1)
