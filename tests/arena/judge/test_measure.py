"""Speed and memory: rounds until timings settle, and growth that no allocator hides."""

import math
from contextlib import nullcontext

import numpy as np
import pytest

from trapline.arena.judge import measure
from trapline.arena.judge.traps import Call


def timings(reference, submission):
    return {"reference": {1: reference, 4: reference}, "submission": {1: submission, 4: submission}}


def test_spread_is_that_of_the_two_fastest():
    assert measure.spread(timings([1.0, 9.0, 1.1], [2.0, 2.0, 7.0])) == pytest.approx(0.1)


class Fake:
    """Stands for `_burst`: the seconds of each racer in turn, repeated for ever."""

    def __init__(self, **seconds):
        self.seconds, self.calls = seconds, dict.fromkeys(seconds, 0)

    def __call__(self, racer, prepare, rng, n):
        count, times = self.calls[racer], self.seconds[racer]
        self.calls[racer] += 1
        return measure.Burst([], [], n * times[count % len(times)], [])


@pytest.fixture
def speed(sorting, monkeypatch):
    def run(**seconds):
        fake = Fake(**seconds)
        monkeypatch.setattr(measure, "_burst", fake)
        monkeypatch.setattr(measure, "quiet", nullcontext)
        monkeypatch.setattr(measure, "paused", lambda _: nullcontext())
        return measure.speed(sorting, "submission", "reference", np.random.default_rng(1), 3)[0]

    return run


def test_timings_that_do_not_settle_get_further_rounds(speed):
    assert speed(reference=[1.0], submission=[1.0]).evidence["rounds"] == 3
    noisy = speed(reference=[1.0], submission=[1.0 + 0.31 * n for n in range(40)])
    assert noisy.evidence["rounds"] == 3 * measure.MOST_ROUNDS


def test_only_bursts_that_have_not_settled_are_repeated():
    steady, noisy = [1.0, 1.0, 1.0], [1.0, 1.1, 1.2]
    timings = {"reference": {1: steady, 4: noisy}, "submission": {1: steady, 4: steady}}
    assert len(measure._due(timings, 2, 3)) == 4
    assert measure._due(timings, 3, 3) == [("reference", 4)]
    assert measure._due(timings, 3 * measure.MOST_ROUNDS, 3) == []


def test_ratio_within_the_noise_of_the_reference_is_that_of_the_reference(speed):
    equal = speed(reference=[1.0, 1.05], submission=[1.0, 1.05])
    slower = speed(reference=[1.0, 1.05, 1.09], submission=[1.02, 1.05])
    assert slower.evidence["ratio"] < 0.985
    assert slower.score == equal.score


def test_noise_of_the_submission_is_no_excuse(speed):
    slow = speed(reference=[1.0], submission=[8.0, 100.0])
    assert slow.evidence["noise"] == measure.SETTLED_SPREAD
    assert slow.score < 50
    assert math.isclose(slow.evidence["ratio"], 1 / 8, rel_tol=0.01)


SOURCE = """
import numpy as np

def sort_rows(x, *, descending=False):
    order = np.argsort(-x if descending else x, axis=1, kind="stable").astype(np.int64)
    scratch = np.ones((300, x.size))
    return np.take_along_axis(x, order, axis=1) + 0 * scratch[0, 0], order
"""


def test_linear_memory_has_exponent_one(sorting, level, tmp_path, monkeypatch):
    """What an allocator keeps from one size must not serve the next."""
    from trapline.arena.process.proxy import Submission

    (tmp_path / "solution.py").write_text(SOURCE)

    def memory(submission, rng, size):
        return Call("sort_rows", (rng.standard_normal((1, size)),))

    monkeypatch.setattr(sorting.module("cases"), "memory", memory, raising=False)
    plan = measure.MemoryPlan(sizes=[1000, 2000, 4000, 8000], max_exponent=1.0)
    config = sorting.sandbox_config(level)
    with Submission(tmp_path, config) as submission:
        growth = measure.memory_growth(sorting, submission, np.random.default_rng(3), plan)
    assert growth.exponent == pytest.approx(1.0, abs=0.1)
