"""The numeric difference of a replay."""

from datetime import UTC, datetime

from trapline.arena.record import Cell, Dimension
from trapline.arena.runs.replay import Replay


def _cell(score, **dimensions):
    return Cell(
        entrant="a",
        challenge="one",
        state="pass",
        score=score,
        letter="A",
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
