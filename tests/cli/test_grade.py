"""What `trapline grade` tells beside the matrix."""

from contextlib import closing
from datetime import UTC, datetime

from trapline.arena.record import Bundle, Cell, Dimension
from trapline.arena.store import Store
from trapline.cli import grade


def one(**changes):
    cell = {"state": "pass", "score": 90.0, "letter": "A-", "reason": "", "dimensions": {}}
    return Cell(
        entrant="me",
        challenge="kv_cache",
        isolation="process",
        cases=[],
        traps=[],
        submission_digest="s",
        challenge_digest="c",
        seed=1,
        versions={},
        started=datetime(2026, 1, 1, tzinfo=UTC),
        seconds=1.0,
        **(cell | changes),
    )


def judged(reason):
    cell = one(dimensions={"analysis": Dimension(score=None, reason=reason)})
    return Bundle(cell=cell, files={})


def test_a_judge_who_says_nothing_is_told(monkeypatch, tmp_path, capsys):
    reason = "the judge gave no answer: HTTP 401"
    monkeypatch.setattr(grade, "judge_cells", lambda *_: [judged(reason)])
    with closing(Store(tmp_path / "run")) as store:
        grade._judge_all(None, [], store)
        assert [cell.entrant for cell in store.cells()] == ["me"]
    assert f"1 analysis was not judged: {reason}" in " ".join(capsys.readouterr().err.split())


def test_it_is_told_why_a_cell_is_not_measured(capsys):
    reason = "there is no answer to grade: HTTP 401"
    dead = {"state": "infra_error", "score": None, "letter": None, "reason": reason}
    grade._tell_unmeasured([one(), *(one(attempt=n, **dead) for n in range(1, 8))])
    said = " ".join(capsys.readouterr().err.split())
    assert f"me/kv_cache #1 was not measured: {reason}" in said
    assert said.count(reason) == 5
    assert "2 more were not measured" in said
