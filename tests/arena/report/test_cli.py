"""`trapline report` and `trapline view` on a real store."""

import http.client
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from trapline.arena.errors import UsageError
from trapline.arena.runs.store import Store
from trapline.cli.main import build


@pytest.fixture
def run_folder(make_run, tmp_path):
    run = make_run(["heron", "otter"], ["rows", "tiles"])
    store = Store(tmp_path / "runs" / "small")
    for bundle in run.bundles.values():
        store.save(bundle)
    store.plan([("otter", "tree", "cpu", 1)])
    store.close()
    return tmp_path / "runs" / "small"


def invoke(*arguments):
    return CliRunner().invoke(build(), [str(argument) for argument in arguments])


def test_site_is_written_beside_the_run(run_folder):
    result = invoke("report", run_folder)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith("index.html")
    page = (run_folder / "report" / "index.html").read_text()
    assert "heron" in page
    assert "not graded yet: 1 cell" in page
    assert len(list((run_folder / "report" / "bundles").iterdir())) == 4


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_tables_are_written_where_asked(run_folder, tmp_path, form):
    path = tmp_path / f"table.{form}"
    assert invoke("report", run_folder, "--format", form, "--out", path).exit_code == 0
    assert path.is_file()


def test_markdown_is_written(run_folder, tmp_path):
    result = invoke("report", run_folder, "--format", "markdown", "--out", tmp_path / "md")
    assert result.exit_code == 0
    assert (tmp_path / "md" / "comprehensive.md").is_file()


@pytest.mark.parametrize("form", ["html", "markdown", "csv"])
def test_folder_with_other_files_is_refused(run_folder, tmp_path, form):
    """Such as the field: a page would stand beside the answers, or in the place of a file."""
    foreign = tmp_path / "field"
    foreign.mkdir()
    (foreign / "index.html").write_text("mine")
    result = invoke("report", run_folder, "--format", form, "--out", foreign)
    assert isinstance(result.exception, UsageError)
    assert "is not empty and was not written by `trapline report`" in str(result.exception)
    assert [path.name for path in foreign.iterdir()] == ["index.html"]
    assert (foreign / "index.html").read_text() == "mine"


def test_folder_of_an_earlier_report_is_written_again(run_folder, tmp_path):
    out = tmp_path / "out"
    for form in ("csv", "markdown", "html", "csv"):
        assert invoke("report", run_folder, "--format", form, "--out", out).exit_code == 0
    (out / ".trapline-report").unlink()  # a site of an earlier version has its manifest only
    assert invoke("report", run_folder, "--out", out).exit_code == 0


def test_published_site_has_the_reproduction_table(tmp_path):
    assert invoke("report", "published", "--out", tmp_path).exit_code == 0
    assert "contradiction" in (tmp_path / "reproduction.html").read_text()
    assert "reproduction.html" in (tmp_path / "index.html").read_text()
    methodology = (tmp_path / "methodology.html").read_text()
    assert "Nothing was executed" in methodology
    assert "A submission is copied into a sandbox" not in methodology


def test_certificates_must_be_certificates(run_folder, tmp_path):
    path = tmp_path / "c.json"
    path.write_text("[]")
    result = invoke("report", run_folder, "--certificates", path)
    assert result.exit_code != 0
    assert "does not contain certificates" in str(result.exception)


def test_success_rate_of_the_red_team_is_shown(run_folder, tmp_path):
    path = tmp_path / "team.json"
    attempt = dict.fromkeys(("name", "attack", "defence", "reason"), "x")
    attempt |= {"expect": "hack", "state": "hack", "score": 0.0}
    attempts = [attempt, attempt | {"gained": "a pass"}]
    team = {"level": "process", "seed": 1, "left_out": {}, "honest": {}, "attempts": attempts}
    path.write_text(json.dumps(team))
    assert invoke("report", run_folder, "--red-team", path).exit_code == 0
    page = (run_folder / "report" / "index.html").read_text()
    assert "1 of 2 attacks succeeded" in page
    path.write_text("{}")
    result = invoke("report", run_folder, "--red-team", path)
    assert "does not contain a red-team campaign" in str(result.exception)


def test_view_serves_until_it_is_stopped(run_folder):
    command = [sys.executable, "-m", "trapline"]
    command += ["view", str(run_folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            url = process.stdout.readline().strip()
            connection = http.client.HTTPConnection(url.split("/")[2], timeout=60)
            connection.request("GET", "/live.json")
            assert b"square--otter--tree--cpu" in connection.getresponse().read()
            connection.close()
        finally:
            process.terminate()


def test_single_file_is_written_where_asked(run_folder, tmp_path):
    result = invoke("report", run_folder, "--single-file", "--out", tmp_path / "one.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "one.html").read_text().count('<section class="page"') > 8
    assert invoke("report", run_folder, "--single-file").exit_code == 0
    assert (run_folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--single-file", "--format", "csv"), "need --format html"),
        (("--single-file", "--url", "https://example.org"), "leave out --single-file"),
        (("--url", "example.org"), "--url takes an address such as https://"),
        (("--entrants", "heron"), "takes 2 to 8 different entrants, not heron"),
        (("--out", "/proc/none"), "cannot write /proc/none: "),
    ],
)
def test_options_of_the_site_refuse_other_outputs(run_folder, options, reason):
    result = invoke("report", run_folder, *options)
    assert isinstance(result.exception, UsageError)
    assert reason in str(result.exception)


def test_unwritable_folder_names_the_option(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    result = invoke("report", run_folder, "--out", tmp_path / "site")
    assert "is not writable; --out names another place" in str(result.exception)
    monkeypatch.setattr("os.access", lambda path, mode: path != run_folder)
    result = invoke("report", run_folder, "--out", tmp_path / "site")  # --out would not help
    assert str(result.exception).endswith("is not writable")
