"""What differs between a verdict and its replay."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from trapline.arena.judge.grade import grade
from trapline.arena.judge.intake import Intake
from trapline.arena.judge.request import GradeRequest
from trapline.arena.judge.rubric import letter
from trapline.arena.record import Cell, Dimension, Finding
from trapline.arena.runs import replay as replaying
from trapline.arena.runs.replay import Replay, _differences, replay


def _cell(score, **dimensions):
    return Cell(
        entrant="a",
        challenge="one",
        state="pass",
        score=score,
        letter=letter(score),
        reason="",
        isolation="process",
        dimensions={n: Dimension(score=value, reason="") for n, value in dimensions.items()},
        cases=[],
        traps=[],
        submission_digest="",
        challenge_digest="",
        seed=1,
        versions={},
        started=datetime(2026, 1, 1, tzinfo=UTC),
        seconds=1.0,
    )


def test_difference_names_what_moved_and_nothing_else():
    before = _cell(95.0, speed=80.0, code=90.0, analysis=None)
    after = _cell(94.2, speed=72.04, code=90.0, analysis=50.0)
    moved = Replay(before=before, after=after, differences=[]).moved
    assert moved == {"score": -0.8, "speed": -8.0}


def test_equal_verdicts_did_not_move():
    one = _cell(95.0, speed=80.0)
    assert Replay(before=one, after=one, differences=[]).moved == {}


def test_another_letter_is_not_the_same_verdict():
    before, moved, lower = _cell(93.0), _cell(93.4), _cell(92.9)
    assert Replay(before=before, after=moved, differences=[]).agreement == "same verdicts"
    said = Replay(before=before, after=lower, differences=[]).agreement
    assert said == "same checks and findings; the letter differs by what was measured"


def test_dimension_that_was_measured_once_is_not_the_same_verdict():
    before, after = _cell(95.0, speed=80.0, analysis=50.0), _cell(95.0, speed=None, analysis=None)
    said = Replay(before=before, after=after, differences=[]).agreement
    assert said == "same checks and findings; measured in one of the two only: speed"


def test_finding_that_is_less_certain_is_a_difference():
    def cell(certainty):
        finding = Finding(
            cause="a", certainty=certainty, severity="minor", sentence="A bug.", explains=["a"]
        )
        return _cell(95.0).model_copy(update={"findings": [finding]})

    assert _differences(cell("confirmed"), cell("confirmed")) == []
    assert _differences(cell("confirmed"), cell("likely")) == [
        "findings: a (confirmed) before, a (likely) now"
    ]


@pytest.fixture
def without_answer(sorting, tmp_path, monkeypatch):
    """Grades the starter of the sorting challenge, or nothing; its evidence can be replayed."""
    monkeypatch.setattr(replaying, "load", lambda *_: sorting)
    request = GradeRequest("somebody", "sorting", 1, tmp_path)

    def make(with_starter=True, **why):
        if with_starter:
            starter = sorting.folder / "starter" / "solution.py"
            tmp_path.joinpath("solution.py").write_text(starter.read_text())
        return grade(replace(request, **why), sorting)

    return make


@pytest.mark.parametrize(
    ("why", "state"),
    [
        ({"unanswered": "refused: I would rather not (really)"}, "no_answer"),
        ({"unanswered": "truncated: at 100 tokens"}, "no_answer"),
        ({}, "no_answer"),
        ({"with_starter": False}, "no_answer"),
        ({"intake": Intake({}, "the name of the entrant's folder cannot be printed")}, "fail"),
        ({"trouble": "the provider is down"}, "infra_error"),
    ],
)
def test_evidence_without_an_answer_is_replayed_alike(without_answer, why, state):
    bundle = without_answer(**why)
    assert bundle.cell.state == state
    again = replay(bundle, "process")
    assert (again.differences, again.moved) == ([], {})
    assert again.after.reason == bundle.cell.reason


def test_answer_that_is_called_missing_is_graded(without_answer, gold_source):
    """The evidence of an answer cannot be turned into one without."""
    bundle = without_answer(unanswered="refused: no")
    changed = bundle.model_copy(update={"files": {"solution.py": gold_source + "# mine\n"}})
    assert "state: no_answer before, pass now (every contract case holds)" in (
        replay(changed, "process").differences
    )
