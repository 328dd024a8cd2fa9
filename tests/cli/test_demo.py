"""`trapline demo`: what it refuses, and that the report is written whatever was measured.

tests/packaging grades with it.
"""

import pytest
import typer
from typer.testing import CliRunner

from trapline.arena.errors import MissingError, UsageError
from trapline.arena.runs.field import EXAMPLE_FIELD
from trapline.cli import demo
from trapline.cli.exit_codes import INCOMPLETE
from trapline.cli.main import build


def run(*args):
    return CliRunner().invoke(build("demo"), ["demo", *args])


@pytest.mark.parametrize(
    ("args", "error", "sentence"),
    [
        (["--challenge", "juggling"], UsageError, "unknown challenge 'juggling'"),
        (["--out", "file"], UsageError, "file is a file; a run is a folder"),
        (["--out", "."], UsageError, "report is not empty and was not written by"),
    ],
)
def test_bad_input_is_refused_before_anything_is_graded(
    tmp_path, monkeypatch, args, error, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "mine").write_text("kept")
    ended = run(*args)
    assert isinstance(ended.exception, error)
    assert sentence in str(ended.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "report"]


def test_missing_plots_are_reported_before_anything_is_graded(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "grade", lambda *_, **__: pytest.fail("graded without plots"))
    ended = run("--out", str(tmp_path / "run"))
    assert isinstance(ended.exception, MissingError)
    assert "trapline[report]" in str(ended.exception)


def test_unmeasured_cells_end_with_a_report_and_their_exit_code(tmp_path, monkeypatch):
    calls = []

    def grade(field, challenge, **options):
        calls.append((field, options["out"]))
        raise typer.Exit(INCOMPLETE)

    def report(run, out, **published):
        calls.append((run, out))
        assert all(path.is_file() for path in published.values())

    monkeypatch.setattr(demo, "grade", grade)
    monkeypatch.setattr(demo, "report", report)
    out = tmp_path / "run"
    assert run("--out", str(out)).exit_code == INCOMPLETE
    assert calls == [(EXAMPLE_FIELD, str(out)), (str(out), out / "report")]


def test_level_is_chosen(tmp_path, monkeypatch):
    levels = []
    monkeypatch.setattr(demo, "grade", lambda *_, isolation, **__: levels.append(isolation))
    monkeypatch.setattr(demo, "report", lambda *_, **__: None)
    assert run("--out", str(tmp_path / "run"), "--isolation", "landlock").exit_code == 0
    assert run("--out", str(tmp_path / "run")).exit_code == 0
    assert levels == ["landlock", None]
