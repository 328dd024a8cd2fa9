"""What `trapline grade` tells beside the matrix."""

from contextlib import closing
from datetime import UTC, datetime

from trapline.arena.record import Bundle, Cell, Dimension
from trapline.arena.store import Store
from trapline.cli import grade


def judged(reason):
    cell = Cell(
        entrant="me",
        challenge="kv_cache",
        state="pass",
        score=90.0,
        letter="A-",
        reason="",
        isolation="process",
        dimensions={"analysis": Dimension(score=None, reason=reason)},
        cases=[],
        traps=[],
        submission_digest="s",
        challenge_digest="c",
        seed=1,
        versions={},
        started=datetime(2026, 1, 1, tzinfo=UTC),
        seconds=1.0,
    )
    return Bundle(cell=cell, files={})


def test_a_judge_who_says_nothing_is_told(monkeypatch, tmp_path, capsys):
    reason = "the judge gave no answer: HTTP 401"
    monkeypatch.setattr(grade, "judge_cells", lambda *_: [judged(reason)])
    with closing(Store(tmp_path / "run")) as store:
        grade._judge_all(None, [], store)
        assert [cell.entrant for cell in store.cells()] == ["me"]
    assert f"1 analysis was not judged: {reason}" in " ".join(capsys.readouterr().err.split())
