"""Certification must itself be able to fail."""

from dataclasses import replace

import pytest

from trapline.arena.certify.certify import Certifier
from trapline.arena.errors import ArenaError
from trapline.arena.judge.traps import edit


@pytest.fixture
def certifier(sorting, level):
    return Certifier(sorting, level, seed=5)


def test_sorting_challenge_holds(certifier):
    certificate = certifier.certify()
    assert certificate.problems() == []
    assert len(certificate.of("right")) == 3
    assert len(certificate.of("named")) == 5
    assert all(finding.fell_to for finding in certificate.of("control"))


@pytest.fixture
def with_traps(sorting, level, monkeypatch):
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


def test_edit_that_no_longer_matches_is_an_error(sorting):
    stale = replace(sorting.traps[0], mutant=edit("not there", ""))
    with pytest.raises(ArenaError, match="mutant of trap unstable: 'not there' occurs 0 times"):
        stale.plant(sorting.solution_files())


def test_mechanical_mutants_fall(certifier):
    certificate = certifier.certify(mechanical=True)
    mutants = certificate.of("mechanical")
    survivors = [f.subject for f in mutants if not f.fell_to]
    assert len(mutants) > 10
    assert len(survivors) <= len(mutants) // 2, survivors
