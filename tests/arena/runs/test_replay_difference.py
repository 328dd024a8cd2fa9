"""What differs between a verdict and its replay."""

from datetime import UTC, datetime

from trapline.arena.judge.rubric import letter
from trapline.arena.record import Cell, Dimension, Finding
from trapline.arena.runs.replay import Replay, _differences


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
