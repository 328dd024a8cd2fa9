"""What `trapline grade` tells beside the matrix."""

from contextlib import closing

from trapline.arena.record import Bundle, Dimension
from trapline.arena.runs.store import Store
from trapline.cli import grade


def test_failed_judgement_is_reported(plain_cell, monkeypatch, tmp_path, capsys):
    reason = "the judge gave no answer: HTTP 401"
    cell = plain_cell(dimensions={"analysis": Dimension(score=None, reason=reason)})
    monkeypatch.setattr(grade, "judge_cells", lambda *_: [Bundle(cell=cell, files={})])
    with closing(Store(tmp_path / "run")) as store:
        grade._judge_all(None, [], store, None)
        assert [cell.entrant for cell in store.cells()] == ["me"]
    assert f"1 analysis was not judged: {reason}" in " ".join(capsys.readouterr().err.split())


def test_reason_of_a_dimension_that_is_not_measured_is_printed(plain_cell, capsys):
    reason = "tests cannot run at isolation 'landlock' on this machine: PermissionError"
    unmeasured = {
        "tests": Dimension(score=None, reason=reason),
        "analysis": Dimension(score=None, reason="no judge was asked"),
    }
    grade._tell_unmeasured([plain_cell(dimensions=unmeasured), plain_cell(attempt=2)])
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"trapline: me/kv_cache #1: tests not measured: {reason}"


def test_reason_of_an_unmeasured_cell_is_printed(plain_cell, capsys):
    reason = "there is no answer to grade: HTTP 401"
    dead = {"state": "infra_error", "score": None, "letter": None, "reason": reason}
    grade._tell_unmeasured([plain_cell(), *(plain_cell(attempt=n, **dead) for n in range(1, 8))])
    said = " ".join(capsys.readouterr().err.split())
    assert f"me/kv_cache #1 was not measured: {reason}" in said
    assert said.count(reason) == 5
    assert "2 more were not measured" in said
    grade._tell_unmeasured([plain_cell(attempt=n, **dead) for n in range(1, 7)])
    assert "1 more was not measured" in " ".join(capsys.readouterr().err.split())
