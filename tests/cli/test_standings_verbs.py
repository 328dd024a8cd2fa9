"""`trapline rank`, `duel` and `lint` on a run that has everything: ties, gaps, hostile names."""

import json
import sqlite3
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from trapline.arena.errors import UsageError
from trapline.arena.judge.rubric import letter
from trapline.arena.record import Bundle, Cell, CheckResult, Dimension
from trapline.arena.runs.store import Store
from trapline.cli.main import build, guarded

HOSTILE = "[red]an entrant with a very long name that wants to be bold[/red]"


@pytest.fixture
def call():
    """Runs one verb in a terminal of 80 columns."""

    def run(*arguments):
        return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}).invoke(
            build(), list(arguments)
        )

    return run


def _cell(entrant, challenge, score, *, given=None):
    return Cell(
        entrant=entrant,
        challenge=challenge,
        state="infra_error" if score is None else "pass",
        score=score,
        letter=None if score is None else given or letter(score),
        reason="",
        isolation="process",
        dimensions={"code": Dimension(score=score, reason="read")},
        cases=[CheckResult(id="c", state="pass")],
        traps=[],
        submission_digest=f"{entrant}{challenge}",
        challenge_digest="v",
        seed=1,
        versions={},
        started=datetime(2026, 1, 1, tzinfo=UTC),
        seconds=1.0,
    )


@pytest.fixture
def make_run(tmp_path):
    def make(*cells):
        store = Store(tmp_path / "run")
        for cell in cells:
            store.save(Bundle(cell=cell, files={}))
        store.close()
        return str(tmp_path / "run")

    return make


@pytest.fixture
def run_folder(make_run):
    return make_run(
        *(_cell("steady", f"challenge_number_{n}", 100.0) for n in range(4)),
        *(_cell(HOSTILE, f"challenge_number_{n}", 100.0 - 7 * n) for n in range(3)),
        _cell("ghost", "challenge_number_0", None),
    )


def _fits(text):
    return max(len(line) for line in text.splitlines()) <= 80


def test_rank_prints_a_table_and_the_caveat_first(call, run_folder):
    result = call("rank", run_folder, "--rounds", "50", "--picks")
    assert result.exit_code == 0
    assert result.output.startswith("steady")
    assert "not measured: ghost" in result.output
    assert "[red]" in result.output
    assert _fits(result.output)


def test_rank_as_json(call, run_folder):
    told = json.loads(call("rank", run_folder, "--rounds", "50", "--json").output)
    assert [each["entrant"] for each in told["standings"]] == ["steady", HOSTILE]
    assert told["unranked"] == ["ghost"]


def test_duel_prints_bouts_and_edges(call, run_folder):
    result = call("duel", "steady", HOSTILE, "--run", run_folder)
    assert result.exit_code == 0
    assert result.output.startswith("steady leads 2-0-1")
    assert "code" in result.output
    assert "not compared: challenge_number_3" in result.output.replace("\n", " ")
    assert _fits(result.output)
    three = call("duel", "steady", HOSTILE, "ghost", "--run", run_folder)
    assert "Outright wins" in three.output
    assert _fits(three.output)


def test_duel_as_json(call, run_folder):
    told = json.loads(call("duel", "steady", HOSTILE, "--run", run_folder, "--json").output)
    assert told["records"][0]["won"] == 2


def test_unknown_entrant_in_a_duel_is_a_usage_error(call, run_folder):
    result = call("duel", "steady", "stranger", "--run", run_folder)
    assert isinstance(result.exception, UsageError)


def test_a_folder_without_a_run_is_a_usage_error(call, tmp_path):
    for verb in ("rank", "lint"):
        assert isinstance(call(verb, str(tmp_path / "nothing")).exception, UsageError)
    assert not (tmp_path / "nothing").exists()


def test_last_run_is_the_default(call, run_folder, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "latest")
    monkeypatch.chdir(tmp_path)
    assert call("rank", "--rounds", "10").output.startswith("steady")


def test_lint_finds_nothing_in_a_sound_run(call, run_folder):
    result = call("lint", run_folder)
    assert result.exit_code == 0
    assert result.output.strip() == "0 contradictions"


def test_lint_exits_with_4_and_names_the_contradiction(call, make_run):
    folder = make_run(_cell("a", "one", 95.0, given="C"))
    result = call("lint", folder)
    assert result.exit_code == 4
    assert "letter C beside a score of 95.0" in " ".join(result.output.replace("│", "").split())
    told = json.loads(call("lint", folder, "--json").output)
    assert told["contradictions"][0]["rule"] == "letter"


def test_report_of_a_changed_bundle_exits_with_4(make_run, tmp_path, capsys):
    folder = make_run(_cell("a", "one", 95.0))
    (bundle,) = (tmp_path / "run" / "bundles").iterdir()
    bundle.write_text(bundle.read_text() + " ")
    with pytest.raises(SystemExit) as ended:
        guarded(lambda: build("report")(["report", folder, "--format", "markdown"]))
    assert ended.value.code == 4
    assert "was changed" in capsys.readouterr().err


def test_lint_sees_a_missing_bundle(call, make_run, tmp_path):
    folder = make_run(_cell("a", "one", 95.0))
    for path in (tmp_path / "run" / "bundles").iterdir():
        path.unlink()
    result = call("lint", folder, "--json")
    assert result.exit_code == 4
    assert json.loads(result.output)["contradictions"][0]["rule"] == "evidence"


def test_lint_says_how_many_records_are_damaged(call, make_run, tmp_path):
    folder = make_run(*(_cell(name, "one", 95.0) for name in ("a", "b", "c")))
    raw = sqlite3.connect(tmp_path / "run" / "run.sqlite")
    raw.execute("UPDATE cells SET record = replace(record, '95.0', '96.0') WHERE entrant <> 'a'")
    raw.commit()
    raw.close()
    result = call("lint", folder, "--json")
    assert result.exit_code == 4
    (found,) = json.loads(result.output)["contradictions"]
    assert found["message"] == "2 damaged records were left out"


def test_lint_published_lists_the_contradictions(call):
    result = call("lint", "published")
    assert result.exit_code == 4
    assert _fits(result.output)
    assert "participation" in result.output
    told = json.loads(call("lint", "published", "--json").output)["contradictions"]
    assert all(row["verdict"] == "contradiction" and row["sources"] for row in told)


def test_rank_and_duel_know_the_published_field(call):
    assert "cannot be distinguished" in call("rank", "published", "--rounds", "200").output
    assert call("duel", "GLM-5", "Qwen3-6", "--run", "published").exit_code == 0


@pytest.mark.parametrize("verb", ["rank", "duel", "lint"])
def test_help_shows_an_example(call, verb):
    assert f"Example: trapline {verb}" in call(verb, "--help").output
