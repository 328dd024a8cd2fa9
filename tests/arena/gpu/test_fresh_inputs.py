"""Which answers are taken to remember: those whose calls take much longer on new inputs."""

import contextlib
from types import SimpleNamespace

import pytest

from trapline.arena.errors import Violation
from trapline.arena.gpu import fresh_inputs

GROUP = 18
GOLD = 10e-6


class Slot:
    def write_inputs(self):
        pass


class Clock:
    """A call of this process takes `fresh` seconds on new inputs; being woken costs `waking`."""

    def __init__(self, ring, fresh, waking):
        self.ring, self.fresh, self.waking = ring, fresh, waking
        self.answer = SimpleNamespace(frozen=contextlib.nullcontext)

    def times(self, rounds):
        return SimpleNamespace(best=self.fresh)


@pytest.fixture
def refuse(monkeypatch):
    """Whether an answer is refused, by its times on seen and on new inputs."""
    ring = SimpleNamespace(slots=[Slot() for _ in range(24)], group=GROUP, spare=[])
    ring.timed = SimpleNamespace(name="a shape", make=lambda rng: ())
    ring.poison = lambda: None

    def visit(clock, slots, start):
        assert len(slots) == GROUP
        return next(clock.waking) + GROUP * clock.fresh

    def judged(seen, fresh, waking, gold_waking):
        gold = Clock(ring, GOLD, iter(gold_waking))
        monkeypatch.setattr(fresh_inputs, "Clock", lambda ring, answer: gold)
        monkeypatch.setattr(fresh_inputs, "_visit", visit)
        monkeypatch.setattr(fresh_inputs, "_check", lambda *_: None)
        answer = Clock(ring, fresh, iter(waking))
        try:
            fresh_inputs.refuse_remembered(answer, gold.answer, SimpleNamespace(best=seen))
        except Violation as violation:
            return "remembers answers" in str(violation)
        return False

    return judged


def always(seconds):
    return [seconds] * 100


@pytest.mark.parametrize("seconds", [4e-6, 10e-6, 1e-3])
@pytest.mark.parametrize("waking", [0.0, 5e-4, 1.9e-3])
def test_honest_answer_is_cleared_however_long_waking_takes(refuse, seconds, waking):
    assert not refuse(seconds, seconds, always(waking), always(waking))


def test_one_undisturbed_burst_clears_an_answer(refuse):
    waking = [*always(0.05)[: fresh_inputs.ROUNDS - 1], 5e-4]
    assert not refuse(5e-6, 5e-6, waking, always(5e-4))


@pytest.mark.parametrize("seen", [5e-6, 50e-6])
def test_answer_that_remembers_is_refused(refuse, seen):
    assert refuse(seen, 10 * seen + 40e-6, always(5e-4), always(5e-4))


def test_work_left_on_the_gpu_excuses_little(refuse):
    """It makes the gold solution slower, and the hand-over seem longer."""
    assert refuse(10e-6, 400e-6, always(5e-4), always(1.0))
