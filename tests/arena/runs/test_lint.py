"""Every rule is seen to be silent on a sound run and to speak on a broken one."""

from datetime import UTC, datetime

import pytest

from trapline.arena.errors import ArenaError
from trapline.arena.judge.inspection import Inspection, code_dimension
from trapline.arena.record import Bundle, Cell, CheckResult, Dimension, Finding
from trapline.arena.runs.lint import Terms, lint_run

TERMS = {
    "one": Terms(
        digest="v1",
        weights={"correctness": 0.5, "traps": 0.5},
    )
}


def _cell(**changes):
    return Cell(
        **{
            "entrant": "a",
            "challenge": "one",
            "state": "pass",
            "score": 90.0,
            "letter": "A-",
            "reason": "",
            "isolation": "landlock",
            "dimensions": _dimensions(traps=80.0),
            "cases": _checks(c1="pass", c2="pass"),
            "traps": _checks(deep="pass", flat="sprung"),
            "findings": [_finding("flat", "minor", 20.0)],
            "submission_digest": "s1",
            "challenge_digest": "v1",
            "seed": 1,
            "versions": {},
            "started": datetime(2026, 1, 1, tzinfo=UTC),
            "seconds": 1.0,
            **changes,
        }
    )


def _dimensions(**scores):
    found = {"correctness": 100.0, "traps": 100.0, **scores}
    return {name: Dimension(score=score, reason="seen") for name, score in found.items()}


def _finding(cause, severity, penalty):
    return Finding(
        cause=cause,
        certainty="confirmed",
        severity=severity,
        sentence="A bug.",
        explains=[cause],
        penalty=penalty,
    )


def _checks(**states):
    return [CheckResult(id=name, state=state) for name, state in states.items()]


SOUND = {
    "a pass": _cell(),
    "a failure because nobody can read its code": _cell(
        state="fail",
        score=69.0,
        letter="D",
        dimensions={
            **_dimensions(traps=80.0),
            "code": code_dimension(Inspection(unreadable="RecursionError")),
        },
    ),
    "a failure under its cap": _cell(
        state="fail",
        score=65.0,
        letter="D",
        cases=_checks(c1="pass", c2="fail"),
        dimensions=_dimensions(correctness=50.0, traps=80.0),
    ),
    "a critical trap under its cap": _cell(
        score=60.0,
        letter="D",
        traps=_checks(deep="sprung", flat="pass"),
        findings=[_finding("deep", "critical", 80.0)],
        dimensions=_dimensions(traps=20.0),
    ),
    "a hack": _cell(state="hack", score=0.0, letter="F"),
    "nothing measured": _cell(
        state="infra_error",
        score=None,
        letter=None,
        dimensions={},
        cases=[],
        traps=[],
        findings=[],
    ),
    "an older version of the challenge": _cell(challenge_digest="v0", score=95.0, letter="A"),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_cells_are_left_alone(name):
    assert lint_run([SOUND[name]], TERMS) == []


BROKEN = {
    "letter A beside a score of 90.0, which is A-": {"letter": "A"},
    "score 91.0, but its dimensions and caps give 90.0": {"score": 91.0},
    "letter A- beside a score of None": {"score": None},
    "pass without a score": {"score": None, "letter": None},
    "pass, but c2 failed": {"cases": _checks(c1="pass", c2="fail")},
    "correctness 100.0, but its checks give 50.0": {"cases": _checks(c1="pass", c2="fail")},
    "pass without a single contract case": {"cases": []},
    "fail, but no contract case failed": {"state": "fail", "score": 69.0, "letter": "D"},
    "90.0 is above the cap of 69 for a failure": {
        "state": "fail",
        "cases": _checks(c1="pass", c2="fail"),
    },
    "a hack with a score of 90.0": {"state": "hack"},
    "infra_error with a score of 90.0": {"state": "infra_error"},
    "traps 80.0, but its findings give 100.0": {
        "traps": _checks(deep="pass", flat="pass"),
        "findings": [],
    },
    "the findings name 1 traps, but 0 are sprung": {"traps": _checks(deep="pass", flat="hidden")},
    "score 100.0, but its dimensions and caps give 86.0": {
        "traps": _checks(deep="sprung", flat="pass"),
        "findings": [_finding("deep", "critical", 0.0)],
        "dimensions": _dimensions(),
        "score": 100.0,
        "letter": "A+",
    },
    "trap flat is counted 2 times": {"traps": [*_checks(flat="sprung"), *_checks(flat="sprung")]},
    "unknown dimension charm": {"dimensions": _dimensions(traps=80.0, charm=50.0)},
    "traps of 180.0 is not between 0 and 100": {"dimensions": _dimensions(traps=180.0)},
    "speed was not measured, and nothing says why": {
        "dimensions": {**_dimensions(traps=80.0), "speed": Dimension(score=None, reason="")}
    },
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_cell_is_named_with_what_is_wrong(message):
    found = lint_run([_cell(**BROKEN[message])], TERMS)
    assert any(message in finding.message for finding in found), found
    assert {finding.where for finding in found} == {"a / one / 1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": 100.5}, "above its best dimension"),
        ({"score": 79.0, "letter": "C+"}, "below its worst dimension"),
        ({"dimensions": _dimensions()}, "traps 100.0, but its findings give 80.0"),
        ({"score": 99.0, "letter": "A+"}, ""),
    ],
)
def test_without_weights_only_impossible_scores_are_reported(changes, message):
    found = lint_run([_cell(**{"challenge_digest": "v0", **changes})], TERMS)
    assert any(message in finding.message for finding in found) == bool(message), found


def test_score_under_the_cap_of_a_critical_trap_is_possible():
    capped = _cell(
        challenge_digest="v0",
        score=86.0,
        letter="B",
        findings=[_finding("flat", "critical", 5.0)],
        dimensions=_dimensions(traps=95.0),
    )
    assert lint_run([capped]) == []


def test_evidence_is_opened_and_compared():
    cell = _cell(bundle="b1")
    assert lint_run([cell], TERMS, lambda _: Bundle(cell=_cell(), files={})) == []
    [finding] = lint_run([cell], TERMS, lambda _: Bundle(cell=_cell(seed=2), files={}))
    assert finding.message == "differs from its evidence in seed"


def test_infinite_figures_survive_the_way_through_json():
    infinite = Dimension(score=0.0, reason="far off", evidence={"ratios": [float("inf")]})
    kept = _cell(bundle="b1", dimensions={**_dimensions(traps=80.0), "precision": infinite})
    stored = Cell.model_validate_json(kept.model_dump_json())
    assert lint_run([stored], TERMS, lambda _: Bundle(cell=kept, files={})) == []


def test_missing_and_unreadable_evidence():
    def gone(_):
        raise ArenaError("b1.json was changed")

    assert lint_run([_cell()], TERMS, gone)[0].message == "graded without an evidence bundle"
    assert lint_run([_cell(bundle="b1")], TERMS, gone)[0].message == "b1.json was changed"
    ungraded = SOUND["nothing measured"]
    assert lint_run([ungraded], TERMS, gone) == []


def test_contradictions_between_cells():
    other = {"entrant": "b", "submission_digest": "s2"}
    levels = lint_run([_cell(), _cell(**other, isolation="process")], TERMS)
    assert levels[0].message == "graded at different isolation levels: landlock, process"
    versions = lint_run([_cell(), _cell(**other, challenge_digest="v0")], TERMS)
    assert versions[0].message == "cells were graded with 2 versions of the challenge"
    fewer = _cell(**other, traps=_checks(deep="pass"), dimensions=_dimensions(), score=100.0)
    messages = [finding.message for finding in lint_run([_cell(), fewer], TERMS)]
    assert "1 checks that others had are missing: flat" in messages


def test_same_bytes_reach_the_same_verdicts():
    twin = _cell(entrant="b")
    assert lint_run([_cell(), twin], TERMS) == []
    lucky = _cell(
        entrant="b",
        traps=_checks(deep="pass", flat="pass"),
        findings=[],
        dimensions=_dimensions(),
        score=100.0,
    )
    lucky = lucky.model_copy(update={"letter": "A+"})
    [finding] = lint_run([_cell(), lucky], TERMS)
    assert finding.message == "the same submission as a / one / 1, with other verdicts"
    assert finding.where == "b / one / 1"


def test_unfinished_run_is_reported():
    assert lint_run([_cell()], TERMS, planned=3)[0].message == "3 cells not graded yet"


def test_order_of_the_cells_does_not_matter():
    cells = [_cell(letter="A"), _cell(entrant="b", score=1.0)]
    assert lint_run(cells, TERMS) == lint_run(cells[::-1], TERMS)
