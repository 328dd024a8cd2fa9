"""The diagnosis of the quick reward is bounded, and says so by findings without a name."""

import corpus
import pytest

from trapline.arena.certify.diagnosis import DiagnosisCertifier
from trapline.arena.challenge import load
from trapline.arena.judge import diagnosis
from trapline.arena.judge.diagnosis import Diagnoser
from trapline.arena.judge.mutants import MutantHost

BUGS = ("beta-missing", "bloated-cache")


@pytest.fixture(scope="module")
def wrong():
    """Layer norm with two bugs, and its failures."""
    challenge = load("layer_norm_backward")
    files = challenge.solution_files()
    for trap in challenge.traps:
        if trap.id in BUGS:
            files = trap.plant(files)
    with DiagnosisCertifier(challenge, corpus.SEED) as certifier:
        yield challenge, list(certifier.failures(certifier.host(corpus.SEED), files, ()))


def found(challenge, failures, *, quick):
    with MutantHost(challenge, corpus.SEED) as host:
        causes = [
            finding.cause
            for finding in Diagnoser(challenge, host, failures, quick=quick).diagnose().findings
        ]
        return causes, host.runs


def test_few_failures_get_the_same_findings(wrong):
    challenge, failures = wrong
    assert found(challenge, failures, quick=True) == found(challenge, failures, quick=False)


def test_after_its_last_comparison_the_rest_is_unnamed(wrong, monkeypatch):
    challenge, failures = wrong
    whole, runs = found(challenge, failures, quick=False)
    monkeypatch.setattr(diagnosis, "QUICK_RUNS", 30)
    causes, fewer = found(challenge, failures, quick=True)
    assert causes[0] == whole[0]
    assert "unnamed" in causes
    assert fewer <= runs / 2
