"""Certification must itself be able to fail."""

from dataclasses import replace

import pytest

from trapline.arena.certify.certify import Certifier
from trapline.arena.errors import ArenaError
from trapline.arena.judge import grade, own_tests
from trapline.arena.judge.traps import edit
from trapline.arena.record import Dimension


@pytest.fixture
def certifier(sorting, level):
    return Certifier(sorting, level, seed=5)


def test_sorting_challenge_holds(certifier):
    certificate = certifier.certify()
    assert certificate.problems() == []
    assert len(certificate.of("right")) == 3
    assert len(certificate.of("named")) == 5
    assert all(finding.fell_to for finding in certificate.of("control"))


def test_gold_is_graded_at_each_level_with_its_own_tests(sorting, level, monkeypatch):
    """Own tests that cannot run at one level are a problem there, and nowhere else."""
    start = own_tests.OwnTests.__init__

    def fails_in_a_plain_process(self, folder, level, *rest):
        start(self, folder, level, *rest)
        if level == "process":
            self.run = lambda *_, **__: {"passed": 0, "failed": 1, "code": 2, "first": "no /tmp"}

    monkeypatch.setattr(own_tests.OwnTests, "__init__", fails_in_a_plain_process)
    own_tests.why_no_tests.cache_clear()
    certifier = Certifier(sorting, level, seed=5, levels=[level, "process"])
    graded = [s() for s in certifier.subjects(mechanical=False) if s.func.__name__ == "_dimensions"]
    own_tests.why_no_tests.cache_clear()
    assert {outcome.subject: outcome.fell_to for outcome in graded} == {
        f"solution at isolation {level}": "",
        "solution at isolation process": "tests",
    }


@pytest.fixture
def quick(monkeypatch, no_measures):
    """What is measured does not depend on traps, and `test_sorting_challenge_holds` runs the gold
    solution's own tests with the same seed."""
    passed = Dimension(score=100.0, reason="run by another test")
    monkeypatch.setattr(grade, "own_tests", lambda *_: passed)


@pytest.fixture
def with_traps(sorting, level, monkeypatch, quick):
    """A certifier whose first trap is another one."""

    def make(**changes):
        first, *others = sorting.traps
        monkeypatch.setitem(sorting.__dict__, "traps", [replace(first, **changes), *others])
        return Certifier(sorting, level, seed=5)

    return make


def test_trap_that_catches_nothing_is_found(with_traps):
    certifier = with_traps(run=lambda submission, rng: None)
    assert [f.subject for f in certifier.certify().problems()] == ["unstable"]


def test_trap_that_punishes_right_answers_is_found(with_traps):
    def unfair(submission, rng):
        raise ValueError("a check that stumbles")

    found = with_traps(run=unfair).certify().problems()
    assert {f.kind for f in found} == {"right"}
    assert len(found) == 3


def test_other_form_of_a_bug_that_its_trap_does_not_catch_is_found(with_traps):
    certifier = with_traps(also=(edit("import numpy as np\n", "import numpy as np\n\n"),))
    assert [f.subject for f in certifier.certify().problems()] == ["unstable#2"]


def test_control_that_the_bug_fails_is_found(sorting, with_traps):
    trap = sorting.traps[0]
    (found,) = with_traps(control=trap.run).certify().problems()
    assert (found.subject, found.problem[:26]) == ("unstable", "fails without the trigger,")


def test_control_that_right_answers_fail_is_found(sorting, with_traps):
    def unfair(submission, rng):
        raise ValueError("a control that stumbles")

    found = with_traps(control=unfair).certify().problems()
    assert {(f.kind, f.fell_to) for f in found if f.kind == "right"} == {
        ("right", "control of unstable")
    }


def test_edit_that_no_longer_matches_is_an_error(sorting):
    stale = replace(sorting.traps[0], mutant=edit("not there", ""))
    with pytest.raises(ArenaError, match="mutant of trap unstable: 'not there' occurs 0 times"):
        stale.plant(sorting.solution_files())


def test_mechanical_mutants_fall(certifier, quick):
    certificate = certifier.certify(mechanical=True)
    mutants = certificate.of("mechanical")
    survivors = [f.subject for f in mutants if not f.fell_to]
    assert len(mutants) > 10
    assert len(survivors) <= len(mutants) // 2, survivors
