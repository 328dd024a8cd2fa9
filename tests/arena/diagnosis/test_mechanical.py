"""One changed line has one cause: bugs that only happen to fail alike are not accused."""

from types import SimpleNamespace

import pytest

from trapline.arena.certify.diagnosis import DiagnosisCertifier
from trapline.arena.certify.mechanical import mechanical_mutants
from trapline.arena.challenge import load
from trapline.arena.judge.diagnosis import Diagnoser
from trapline.arena.judge.failures import failure_of
from trapline.arena.judge.mutants import MutantHost
from trapline.arena.process.transcript import Exchange, Transcript
from trapline.arena.record import CheckResult

SEED = 11


def findings(name, mutant, *bugs):
    """Of the gold solution with these named bugs and a mechanical change."""
    challenge = load(name)
    files = challenge.solution_files()
    for trap in challenge.traps:
        if trap.id in bugs:
            files = trap.plant(files)
    (changed,) = [one.files for one in mechanical_mutants(files) if one.id == mutant]
    with DiagnosisCertifier(challenge, SEED) as certifier:
        host = certifier.host(SEED)
        failures = list(certifier.failures(host, changed, bugs))
        return Diagnoser(challenge, host, failures).diagnose().findings


@pytest.mark.parametrize(
    ("challenge", "mutant"),
    [
        # It answers nothing, as another bug does in five checks.
        ("beam_search", "solution.py:beam_search/never/1"),
        # Nearly everything ends with one exception; two bugs raise one of that kind.
        ("beam_search", "solution.py:checked/constant/3"),
        # In two of 137 checks an exception ends what is wrong in the others.
        pytest.param("beam_search", "solution.py:step/constant/1", marks=pytest.mark.full),
        # All but three checks end with one refusal; another bug refuses in some of them.
        pytest.param("beam_search", "solution.py:checked/compare/1", marks=pytest.mark.full),
    ],
)
def test_unknown_bug_is_one_finding_without_a_name(challenge, mutant):
    assert [finding.cause for finding in findings(challenge, mutant)] == ["unnamed"]


def test_bad_input_that_is_accepted_is_named_beside_an_unknown_bug():
    found = findings("beam_search", "solution.py:step/constant/1", "fractional-width-accepted")
    assert [finding.cause for finding in found] == ["fractional-width-accepted", "unnamed"]


def failed(check, message="", **exchange):
    transcript = Transcript([Exchange("layer_norm_forward", (), {}, **exchange)])
    return failure_of(CheckResult(id=check, state="fail", message=message), transcript)


@pytest.mark.parametrize(("wrong", "findings"), [(8, 1), (7, 2)])
def test_few_exceptions_beside_many_wrong_answers_are_one_finding(wrong, findings):
    challenge = load("layer_norm_backward")
    cases = [case.id for case in challenge.cases]
    failures = [failed(case, "raised KeyError", raised="KeyError") for case in cases[:2]]
    failures += [failed(case, "off", answer=7.0) for case in cases[2 : 2 + wrong]]
    with MutantHost(challenge, SEED) as host:
        found = Diagnoser(challenge, host, failures).diagnose().findings
    assert [finding.cause for finding in found] == ["unnamed"] * findings
    assert found[0].sentence == "off."


@pytest.mark.parametrize(("severity", "is_weak"), [("critical", False), ("major", True)])
def test_further_bugs_do_not_make_a_critical_one_cheaper(severity, is_weak):
    """A bug that shares nothing but exceptions is withdrawn, but not a critical one."""
    known = SimpleNamespace(
        forms={"bug": "bug"},
        causes={"bug": {"bug"}},
        confirmed={"bug"},
        traps={"bug": SimpleNamespace(severity=severity, keeps_state=False)},
        failures={"bug": SimpleNamespace(end=("raises IndexError",))},
        patterns=SimpleNamespace(refusals=set()),
        answers=SimpleNamespace(same=lambda *_: True, is_telling=lambda *_: False),
    )
    assert Diagnoser._is_weak(known, "bug") is is_weak
