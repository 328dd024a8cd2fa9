"""Speed and memory: costs that other work does not change, and growth that no allocator hides."""

import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from trapline.arena.errors import Violation
from trapline.arena.judge import measure
from trapline.arena.judge.traps import Call
from trapline.arena.process.isolation import cgroups
from trapline.arena.process.proxy import Submission
from trapline.arena.process.transcript import Exchange, Transcript


class Answer:
    """Stands for a call and what it answered."""

    def __init__(self, right=True):
        self.right = right

    def check(self, got):
        if not self.right:
            raise Violation("a wrong answer was timed")

    def answer(self):
        return self


class Fake:
    """Stands for `_burst`: the seconds of each racer's calls in turn, repeated for ever.

    A number is processor time and time on the clock alike; a pair is both. A negative number is a
    wrong answer.
    """

    def __init__(self, seconds):
        self.seconds, self.calls = seconds, dict.fromkeys(seconds, 0)

    def __call__(self, racer, prepare, rng, n):
        return [self._next(racer) for _ in range(n)]

    def _next(self, racer):
        times = self.seconds[racer]
        given = times[self.calls[racer] % len(times)]
        self.calls[racer] += 1
        processor, clock = given if isinstance(given, tuple) else (given, given)
        answer = Answer(right=processor > 0)
        return measure.TimedAnswer(answer, answer, "", abs(processor), abs(clock))


@pytest.fixture
def speed(sorting, monkeypatch):
    def run(rounds=6, **seconds):
        monkeypatch.setattr(measure, "_burst", Fake(seconds))
        monkeypatch.setattr(measure, "quiet", nullcontext)
        monkeypatch.setattr(measure, "paused", lambda _: nullcontext())
        monkeypatch.setattr(measure, "kept_to", lambda *_: nullcontext())
        rng = np.random.default_rng(1)
        return measure.speed(sorting, "submission", "reference", rng, rounds)[0]

    return run


#: On the clock, work of others makes three of four calls two or three times as long.
DISTURBED = [(0.02, 0.04), (0.021, 0.06), (0.02, 0.045), (0.0205, 0.021)]


def test_other_work_on_the_machine_does_not_change_the_ratio(speed):
    alone = speed(reference=[0.01], submission=[0.02])
    beside = speed(reference=[0.01], submission=DISTURBED)
    assert beside.evidence["ratio"] == pytest.approx(alone.evidence["ratio"], rel=0.03)


def test_work_on_several_processors_costs_what_the_clock_says(speed):
    assert speed(reference=[1.0], submission=[(4.0, 1.0)]).evidence["ratio"] == 1.0


def test_hidden_processor_time_buys_a_bounded_part(speed):
    hidden = speed(reference=[1.0], submission=[(0.01, 5.0)])
    assert hidden.evidence["ratio"] == pytest.approx(1 / (5.0 * measure.LEAST_SHARE))


def test_slow_first_calls_gain_nothing(speed):
    even = speed(reference=[1.0], submission=[4.0])
    dawdling = speed(reference=[1.0], submission=[4.0, 9.0, 4.0, 4.0, 4.0])
    assert dawdling.evidence["ratio"] == even.evidence["ratio"]


@pytest.mark.parametrize("skipped", [1, 5, 20])
def test_skipped_work_is_found_in_the_calls_that_decide(speed, skipped):
    calls = [1.0] * 3 + [-0.1] * skipped + [1.0] * 40
    with pytest.raises(Violation, match="a wrong answer was timed"):
        speed(reference=[1.0], submission=calls)


def of_rounds(*seconds):
    """Calls that take so long in one round after the other."""
    return [each for each in seconds for _ in range(measure.BURST)]


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 1.01, 1.02), (1.0, 1.0, 1.0, 1.0, 1.0, 3.0)])
def test_rounds_that_agree_but_for_a_few_are_enough(speed, seconds):
    assert speed(reference=[1.0], submission=of_rounds(*seconds)).evidence["rounds"] == 6


def test_rounds_that_do_not_agree_are_followed_by_others(speed):
    noisy = speed(reference=[1.0], submission=of_rounds(1.0, 1.5, 2.0))
    assert noisy.evidence["rounds"] == 6 * measure.MOST_ROUNDS


def test_no_further_rounds_follow_once_the_ratio_is_certain(speed):
    settling = of_rounds(1.0, 1.5, 1.0, 1.5, 1.2, 1.2, *[1.2] * 18)
    rounds = speed(reference=[1.0], submission=settling).evidence["rounds"]
    assert 6 < rounds < 6 * measure.MOST_ROUNDS


@pytest.mark.parametrize(
    ("seconds", "score", "rounds"),
    [(100.0, 0.0, 2), (0.4, 100.0, 2), (12.0, 0.0, 6), (0.8, 100.0, 6)],
)
def test_further_rounds_are_run_only_where_they_may_change_the_score(speed, seconds, score, rounds):
    found = speed(reference=[1.0], submission=[seconds])
    assert (found.score, found.evidence["rounds"]) == (score, rounds)


#: What shares a core with a processor makes it slower, whoever runs there.
SLOWED = [1.0, 1.6, 1.0, 1.6, 1.6, 1.0]


def test_slow_processors_do_not_change_the_ratio(speed):
    """A round's turns are taken on the same one; the first call is the warm-up."""
    slowed = [factor for factor in SLOWED for _ in range(measure.BURST)]
    reference, submission = ([c, *(c * factor for factor in slowed)] for c in (0.003, 0.02))
    found = speed(reference=reference, submission=submission)
    assert found.evidence["ratio"] == pytest.approx(0.15)


def processors_of(submission):
    return {frozenset(os.sched_getaffinity(p)) for p in submission.session.running.processes()}


@pytest.fixture
def where(sorting, level, monkeypatch):
    """On which processors each turn was taken; `cost`: seconds that every call is said to use."""

    def run(cost=None):
        seen = []
        burst = measure._burst

        def watched(racer, prepare, rng, n):
            seen.append((racer, processors_of(racer)))
            answers = burst(racer, prepare, rng, n)
            return [replace(one, processor=cost) for one in answers] if cost else answers

        monkeypatch.setattr(measure, "_burst", watched)
        config = sorting.sandbox_config(level)
        with (
            Submission(sorting.solution, config) as one,
            Submission(sorting.solution, config) as other,
        ):
            for racer in (one, other):
                racer.start(sorting.plan.entry_points)
            measure.speed(sorting, one, other, np.random.default_rng(1), 2)
            everywhere = {frozenset(os.sched_getaffinity(0))}
            assert processors_of(one) == processors_of(other) == everywhere
        return seen

    return run


def test_both_racers_run_on_one_processor_in_each_round(where):
    _, _, *turns = where()
    assert len(turns) >= 4
    places = [place for _, place in turns]
    assert all(len(processors) == 1 for place in places for processors in place)
    assert places[0::2] == places[1::2]
    if len(os.sched_getaffinity(0)) > 1:
        assert places[0] != places[2]


def test_answer_that_uses_several_processors_keeps_them(where):
    everywhere = {frozenset(os.sched_getaffinity(0))}
    assert all(place == everywhere for _, place in where(cost=1000.0))


class Racer:
    """Stands for a submission that may be asked while a call is drawn."""

    def __init__(self):
        self.transcript = Transcript()


def test_both_racers_get_the_same_values_once():
    one, other, rng = Racer(), Racer(), np.random.default_rng(1)
    draws = measure.SharedDraws(lambda racer, rng: Call("sort", (rng.standard_normal(),)))
    rounds = [
        [[draws(racer, rng) for _ in range(4)] for racer in order]
        for order in ((one, other), (other, one), (one, other))
    ]
    assert all(first == second for first, second in rounds)
    assert len({call.args for calls, _ in rounds for call in calls}) == 12


def test_own_answers_of_a_racer_stay_with_it():
    def prepare(racer, rng):
        racer.transcript.exchanges.append(Exchange("forward", (), {}, None))
        return Call("backward", (racer, rng.standard_normal()))

    one, other, rng = Racer(), Racer(), np.random.default_rng(1)
    draws = measure.SharedDraws(prepare)
    assert [draws(racer, rng).args[0] for racer in (one, other, one)] == [one, other, one]


def test_two_graders_time_one_burst_at_a_time(sorting, level, tmp_path):
    """And neither waits for the other's inputs or checks."""
    (tmp_path / "solution.py").write_text(WORKING)
    call = Call("sort_rows", (np.ones((1, 1)),))
    with Submission(tmp_path, sorting.sandbox_config(level)) as submission:
        with ThreadPoolExecutor(1) as other, measure.quiet():
            prepared = threading.Event()
            burst = other.submit(
                measure._burst, submission, lambda *_: (prepared.set(), call)[1], None, 1
            )
            assert prepared.wait(10)
            time.sleep(0.3)
            assert not burst.done()
        assert len(burst.result()) == 1


#: How many times as long every call takes on the clock because of other programs.
BUSY = 6.0


def test_programs_that_leave_no_call_alone_do_not_change_the_ratio(speed):
    """The time on the clock, which bounds hidden work, was three times the reference's cost."""
    beside = speed(reference=[(0.006, 0.006 * BUSY)], submission=[(0.036, 0.036 * BUSY)])
    assert beside.evidence["ratio"] == pytest.approx(1 / 6, rel=0.01)
    later = speed(reference=[(0.006, 0.006 * BUSY)], submission=[(0.036, 0.04)])
    assert later.evidence["ratio"] == pytest.approx(1 / 6, rel=0.01)


def test_hidden_work_is_bounded_beside_other_programs(speed):
    hidden = speed(reference=[(1.0, BUSY)], submission=[(0.01, 5.0 * BUSY)])
    assert hidden.evidence["ratio"] == pytest.approx(1 / (5.0 * measure.LEAST_SHARE))


@pytest.mark.parametrize("seconds", [0.93, 1.0, 1.05, 1.08])
def test_what_noise_explains_scores_as_the_reference_does(speed, seconds):
    assert speed(reference=[1.0], submission=[seconds]).score == 100.0


def test_difference_of_fifteen_percent_shows(speed):
    assert speed(reference=[1.0], submission=[1.15]).score < 98.0
    slow, slower = (speed(reference=[1.0], submission=[s]).score for s in (2.0, 2.3))
    assert slow - slower > 5.0


def test_score_has_no_step_where_noise_ends(speed):
    scores = [speed(reference=[1.0], submission=[1.0 + n / 100]).score for n in range(20)]
    assert max(one - next_one for one, next_one in pairwise(scores)) < 0.6


def test_noise_of_the_submission_is_no_excuse(speed):
    slow = speed(reference=[1.0], submission=[8.0, 100.0])
    assert slow.score < 50
    assert math.isclose(slow.evidence["ratio"], 1 / 8, rel_tol=0.01)


WORKING = """
import os, signal, time
import numpy as np

def work(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def sort_rows(x, *, descending=False):
    work(0.1)
    return x, x

def sort_by(key, items):
    time.sleep(0.1)
    return items
"""


@pytest.mark.parametrize("counted_by", ["control group", "processes"])
def test_processor_time_is_that_of_the_work(sorting, level, tmp_path, monkeypatch, counted_by):
    """Beside another program that never rests, and without what is slept."""
    if counted_by == "processes":
        monkeypatch.setattr(cgroups.Group, "processor_seconds", lambda group: None)
    (tmp_path / "solution.py").write_text(WORKING)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with Submission(tmp_path, sorting.sandbox_config(level)) as submission:
            submission.sort_by(None, [1])
            running = submission.session.running
            used = [running.processor_seconds()]
            submission.sort_rows(np.ones((1, 1)))
            used.append(running.processor_seconds())
            submission.sort_by(None, [1])
            used.append(running.processor_seconds())
    finally:
        busy.kill()
        busy.wait()
    worked, slept = np.diff(used)
    assert worked == pytest.approx(0.1, abs=0.02)
    assert slept < 0.02


SOURCE = """
import numpy as np

def sort_rows(x, *, descending=False):
    order = np.argsort(-x if descending else x, axis=1, kind="stable").astype(np.int64)
    scratch = np.ones((300, x.size))
    return np.take_along_axis(x, order, axis=1) + 0 * scratch[0, 0], order
"""


def test_linear_memory_has_exponent_one(sorting, level, tmp_path, monkeypatch):
    """What an allocator keeps from one size must not serve the next."""
    (tmp_path / "solution.py").write_text(SOURCE)

    def memory(submission, rng, size):
        return Call("sort_rows", (rng.standard_normal((1, size)),))

    monkeypatch.setattr(sorting.module("cases"), "memory", memory, raising=False)
    plan = measure.MemoryPlan(sizes=[1000, 2000, 4000, 8000], max_exponent=1.0)
    config = sorting.sandbox_config(level)
    with Submission(tmp_path, config) as submission:
        growth = measure.memory_growth(sorting, submission, np.random.default_rng(3), plan)
    assert growth.exponent == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("kibibytes", "exponent"),
    [((256, 256, 512, 1024), 1.0), ((1024, 2304, 4096, 9216), 2.0)],
    ids=["steps of the kernel's counters", "a byte for each pair"],
)
def test_growth_is_fitted_above_the_steps_of_the_counters(
    sorting, monkeypatch, kibibytes, exponent
):
    """The first was measured once for an answer whose memory hardly grows; it scored 83."""
    rises = iter(kibibytes)
    monkeypatch.setattr(measure, "_weigh", lambda *_: (0, next(rises) << 10))
    plan = measure.MemoryPlan(sizes=[1024, 1536, 2048, 3072])
    growth = measure.memory_growth(sorting, None, np.random.default_rng(3), plan)
    assert growth.exponent <= exponent + 0.1
    assert growth.exponent > exponent - 0.6
