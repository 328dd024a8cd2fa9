"""Measures from outside: precision, time and memory, on our clock and by the kernel's figures."""

import fcntl
import math
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.challenge import Challenge, MemoryPlan, SpeedPlan
from trapline.arena.errors import NotMeasuredError, Violation
from trapline.arena.judge.traps import Call, Precision
from trapline.arena.process.proxy import Submission, TimedCall
from trapline.arena.process.session import SandboxConfig
from trapline.arena.record import Dimension

#: Calls in a row; the racers take turns.
BURST = 4
QUICK_ROUNDS = 6
FULL_ROUNDS = 14
#: After so many rounds no further ones are run where they cannot change the score: this many times
#: the ratio, or as much less, scores the same.
LEAST_ROUNDS, DECIDED_BY = 2, 1.5
#: While the ratio is uncertain further rounds are run: up to so many times the planned ones.
MOST_ROUNDS = 3
#: So many calls of a turn decide, the cheapest; the dearer one of them is what a call costs in it.
DECIDING = 2
#: A call costs at least this share of the fastest one's time on the clock, without what other
#: programs add. Processor time that a submission hides, in processes that have ended, buys no more.
LEAST_SHARE = 0.4
#: A standard error of the ratio that moves no score by more than a fifth of a point.
CERTAIN = 0.03
#: Of normal numbers: the standard deviation, in units of the median distance from the median; and
#: the standard error of the median, in units of that of the mean.
DEVIATION_BY_MEDIAN, ERROR_OF_MEDIAN = 1.4826, 1.2533
#: A call that used so many times the time on the clock works on several processors.
PARALLEL = 1.5
#: The speed of the same code in two sandboxes differs by up to this share, beside other work.
SAME_SPEED = 0.08
#: Errors up to twice a careful implementation's score 100; a thousand times its error, 0.
PRECISE_RATIO, USELESS_RATIO = 2.0, 1000.0
#: Growth this much faster than allowed is worth nothing.
EXPONENT_MARGIN = 0.8
#: What a process may hold between calls beyond what the reference does. Memory that is let go in a
#: call makes room for as much that no peak shows, so it must be little.
IDLE_ALLOWANCE = 32 << 20
#: Below this, allocators and page sizes say more than the algorithm; and the kernel's figure of a
#: machine with two processors moves by steps of 256 KiB, since each processor counts for itself.
MEMORY_FLOOR = 512 << 10
#: A challenge's hook: the next call of this racer.
Prepare = Callable[[Submission, np.random.Generator], Call]


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
    """What a call of the reference costs over what one of the submission does.

    The cost is processor time, which other work on the machine hardly changes. What shares a core
    with one processor still makes it slower for seconds, so both racers take a round's turns on the
    same one, and rounds go from one to the next. The median of the rounds' ratios counts.
    """
    prepare = SharedDraws(challenge.module("cases").speed)
    plan = challenge.plan.speed or SpeedPlan()
    racers = {"reference": reference, "submission": submission}
    costs = {name: Costs() for name in racers}
    processors: Sequence[int] = sorted(os.sched_getaffinity(0))
    for name, racer in racers.items():
        with _blamed(name):
            warm_up = _burst(racer, prepare, rng, 1)[0]
            warm_up.check()
        if warm_up.is_parallel:
            processors = ()
    ratio = math.inf
    while not _settled(costs, rounds) and not _is_decided(ratio, costs, plan):
        processor = processors[costs["reference"].rounds % len(processors)] if processors else None
        for index in rng.permutation(len(racers)):
            name = list(racers)[index]
            others = [racer for other, racer in racers.items() if other != name]
            with paused(others), kept_to(racers[name], processor), _blamed(name):
                costs[name].add(_burst(racers[name], prepare, rng, BURST))
        ratio = _ratio(costs)
    # Only cheap calls decide, so only skipped work in them would pay: all of these are checked.
    costs["submission"].check()
    score = _speed_score(ratio, plan)
    evidence: dict[str, Any] = {
        "ratio": round(ratio, 4),
        "noise": SAME_SPEED,
        "milliseconds": {name: round(1e3 * kept.median, 4) for name, kept in costs.items()},
        "rounds": costs["reference"].rounds,
    }
    if operations := getattr(challenge.module("cases"), "OPERATIONS", 0):
        evidence["operations"] = operations
    raw = {
        "timings": {name: kept.bursts for name, kept in costs.items()},
        "clock": {name: kept.fastest for name, kept in costs.items()},
        "digests": [digest for kept in costs.values() for digest in kept.digests],
    }
    reason = f"{ratio:.2f} times the speed of the reference"
    return Dimension(score=score, reason=reason, evidence=evidence), raw


class SharedDraws:
    """Timed calls on fresh values, which take longer to draw than many an answer: what one racer
    got, the other gets next, unless a part of it is an answer of the first."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._drawn: deque[tuple[Submission, Call]] = deque()

    def __call__(self, submission: Submission, rng: np.random.Generator) -> Call:
        if self._drawn and self._drawn[0][0] is not submission:
            return self._drawn.popleft()[1]
        asked = len(submission.transcript.exchanges)
        call = self._prepare(submission, rng)
        if len(submission.transcript.exchanges) == asked:
            self._drawn.append((submission, call))
        return call


def _ratio(costs: dict[str, "Costs"]) -> float:
    return statistics.median(_ratios(costs))


def _ratios(costs: dict[str, "Costs"]) -> list[float]:
    """In each round, a call of the reference over one of the submission.

    The reference hides nothing. The factor by which its fastest call took longer on the clock,
    without our own work, than its processor time is what other programs add to both.
    """
    reference, submission = costs["reference"], costs["submission"]
    added = max(1.0, reference.fastest / max(min(reference.by_round), 1e-6))
    least = max(LEAST_SHARE * submission.fastest / added, 1e-6)
    pairs = zip(reference.by_round, submission.by_round, strict=True)
    return [max(ours, 1e-6) / max(theirs, least) for ours, theirs in pairs]


def _settled(costs: dict[str, "Costs"], rounds: int) -> bool:
    """Whether the planned rounds are done, and the ratio is certain or they were repeated often."""
    done = costs["reference"].rounds
    if done < rounds or done >= MOST_ROUNDS * rounds:
        return done >= rounds
    return _uncertainty(_ratios(costs)) <= CERTAIN


def _uncertainty(ratios: Sequence[float]) -> float:
    """Standard error of their median, as a share of it; a few ratios far off hardly count."""
    logs = np.log(ratios)
    distance = float(np.median(np.abs(logs - np.median(logs))))
    return ERROR_OF_MEDIAN * DEVIATION_BY_MEDIAN * distance / math.sqrt(len(ratios))


def _is_decided(ratio: float, costs: dict[str, "Costs"], plan: SpeedPlan) -> bool:
    """Whether the score is 0 or 100 by far."""
    done = costs["reference"].rounds
    slower, faster = ratio / DECIDED_BY, ratio * DECIDED_BY
    return done >= LEAST_ROUNDS and _speed_score(slower, plan) == _speed_score(faster, plan)


def _speed_score(ratio: float, plan: SpeedPlan) -> float:
    """Full marks wherever noise alone may have made the answer slower; no step at the end of it,
    which would make more of the noise there."""
    return _log_score(plan.full_marks_at / ratio, best=1.0 / (1.0 - SAME_SPEED), worst=10.0)


@dataclass(frozen=True)
class TimedAnswer:
    """One call, what it answered, and its time."""

    call: Call
    timed: TimedCall
    digest: str
    #: Seconds of processor time of everything in the sandbox, and seconds on our clock.
    processor: float
    clock: float

    @property
    def cost(self) -> float:
        """Processor time; work that several processors share costs what the clock says."""
        return min(self.processor, self.clock)

    @property
    def is_parallel(self) -> bool:
        return self.processor > PARALLEL * self.clock

    def check(self) -> None:
        self.call.check(self.timed.answer())


class Costs:
    """What the calls of one racer cost. The answers that decide are kept, to be checked."""

    def __init__(self) -> None:
        self.bursts: list[list[float]] = []
        #: What a call costs in each round.
        self.by_round: list[float] = []
        #: Seconds on the clock of the fastest call.
        self.fastest = math.inf
        self.digests: list[str] = []
        self._deciding: list[TimedAnswer] = []

    @property
    def rounds(self) -> int:
        return len(self.by_round)

    @property
    def median(self) -> float:
        return statistics.median(self.by_round)

    def add(self, burst: list[TimedAnswer]) -> None:
        self.bursts.append([one.cost for one in burst])
        self.fastest = min(self.fastest, *(one.clock for one in burst))
        self.digests += [one.digest for one in burst]
        cheapest = sorted(burst, key=lambda one: one.cost)[:DECIDING]
        self.by_round.append(cheapest[-1].cost)
        self._deciding += cheapest

    def check(self) -> None:
        for one in self._deciding:
            one.check()


def _burst(
    submission: Submission,
    prepare: Prepare,
    rng: np.random.Generator,
    n: int,
) -> list[TimedAnswer]:
    """n calls on fresh values; what they answered is committed before the clock stops."""
    calls = [prepare(submission, rng) for _ in range(n)]
    timed = [TimedCall(submission, call.entry, call.args, call.kwargs, call.on) for call in calls]
    answers = []
    with quiet():
        for call, one in zip(calls, timed, strict=True):
            used, started = _processor_seconds(submission), time.perf_counter()
            ours = time.thread_time()
            digest = one.run()
            clock = time.perf_counter() - started - (time.thread_time() - ours)
            used = _processor_seconds(submission) - used
            answers.append(TimedAnswer(call, one, digest, used, clock))
    return answers


def _processor_seconds(submission: Submission) -> float:
    return submission.session.running.processor_seconds()


@dataclass(frozen=True)
class Growth:
    sizes: list[int]
    extra_bytes: list[int]
    #: What was in use before each call.
    held_bytes: list[int]
    exponent: float


#: (challenge, its digest, level) → what the reference holds between calls on this machine.
_reference_held: dict[tuple[str, str, str], int] = {}


def reference_held(challenge: Challenge, config: SandboxConfig, rng: np.random.Generator) -> int:
    """Bytes in use before a call of the reference, measured once: all answers to a challenge are
    compared with them, with an allowance that is many times what they vary by."""
    key = challenge.full_id, challenge.digest, config.level
    if key not in _reference_held:
        plan = challenge.plan.memory
        assert plan is not None
        with Submission(challenge.solution, config) as reference, _blamed("reference"):
            _reference_held[key], _ = _weigh(challenge, reference, rng, plan, plan.sizes[0])
    return _reference_held[key]


def memory(
    challenge: Challenge, submission: Submission, usual: int, rng: np.random.Generator
) -> tuple[Dimension, dict[str, Any]]:
    """Fits the growth of the kernel's peak figure over the planned sizes; `usual` is what the
    reference holds between calls."""
    plan = challenge.plan.memory
    assert plan is not None
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
    """One burst of timed calls at a time on this machine, across all graders."""
    path = Path(tempfile.gettempdir(), f"trapline-{os.getuid()}.timing")
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def kept_to(submission: Submission, processor: int | None) -> Iterator[None]:
    """Everything inside runs on this processor alone; None: wherever it likes."""
    if processor is None:
        yield
        return
    running = submission.session.running
    running.keep_to({processor})
    try:
        yield
    finally:
        running.keep_to(os.sched_getaffinity(0))


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
