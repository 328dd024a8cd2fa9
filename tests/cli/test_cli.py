"""The program as people meet it: sentences, exit codes, tables that fit, JSON that parses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.runs.store import Store
from trapline.cli.main import build

#: Graded in few seconds.
CHALLENGE = "beam_search"
VERBS = [
    *("challenges", "deploy", "grade", "duel", "rank", "report", "view"),
    *("certify", "replay", "lint", "memory"),
]


def verbs():
    return build().registered_commands


def started(*args, cwd=None, timeout=600):
    """The installed program in a process of its own."""
    program = Path(sys.executable).with_name("trapline")
    command = [str(program), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout)


def test_every_verb_has_an_example():
    commands = {command.name or command.callback.__name__: command for command in verbs()}
    assert commands.keys() >= {*VERBS}
    for name, command in commands.items():
        assert (command.epilog or "").startswith(f"Example: trapline {name}")


def test_version_is_printed():
    done = started("--version")
    assert done.returncode == 0
    assert done.stdout == f"trapline {version('trapline')}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example(trapline, verb):
    done = trapline(verb, "--help")
    assert done.returncode == 0
    assert f"trapline {verb}" in done.stdout
    assert "Example" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("grade", "no-such-folder"), 2, "no such folder"),
        (("grade", "file"), 2, "is a file"),
        (("grade", "empty"), 2, "holds no"),
        (("grade", "field", "--challenge", "juggling"), 2, "unknown challenge 'juggling'"),
        (("certify", "--challenge", "juggling"), 2, "unknown challenge 'juggling'"),
        (("deploy", "file", "--entrant", "me"), 2, "is a file"),
        (("deploy", "new", "--entrant", "../me"), 2, "not an entrant name"),
        (("replay", "nothing.json"), 2, "no bundle"),
        (("replay", "3f", "--run", "postgresql://localhost:1/d"), 3, "cannot be opened"),
        (("rank", "nowhere"), 2, "no run"),
        (("report", "nowhere"), 2, "no run"),
        (("certify", "--track", "gpu"), 3, "there is no GPU here"),
        (
            ("report", "published", "--format", "csv", "--certificates", "x"),
            2,
            "needs --format html",
        ),
        (("grade", "misspelt"), 2, "misspelt/me/kvcache does not name a challenge"),
        (("grade", "field", "--address", "host:6379"), 2, "add --executor ray"),
        (("grade", "field", "--store", "mysql://me:secret@host/d"), 2, "a postgresql:// URL"),
        (("no-such-verb",), 2, "No such command"),
    ],
)
def test_bad_input_gets_a_sentence_and_the_right_exit_code(
    trapline, tmp_path, args, code, sentence
):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "field" / "me" / CHALLENGE).mkdir(parents=True)
    (tmp_path / "misspelt" / "me" / "kvcache").mkdir(parents=True)
    (tmp_path / "misspelt" / "me" / "kvcache" / "solution.py").write_text("")
    done = trapline(*args)
    assert done.returncode == code, done.stderr
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_list_of_challenges(trapline):
    described = json.loads(trapline("challenges", "--json").stdout)["challenges"]
    assert len(described) == 8
    for one in described:
        assert set(one) == {"id", "difficulty", "tracks", "traps"}
        assert len(one["traps"]) >= 10
        assert set(one["traps"][0]) == {"id", "catches", "severity"}
    table = trapline("challenges").stdout
    assert max(map(len, table.splitlines())) <= 80


def test_a_workspace_holds_prompt_and_starter_only(trapline, tmp_path):
    done = trapline("deploy", tmp_path, "--challenge", CHALLENGE, "--entrant", "me")
    assert done.returncode == 0
    folder = tmp_path / "me" / CHALLENGE
    assert {path.name for path in folder.iterdir()} == {"prompt.md", "solution.py"}
    again = trapline("deploy", tmp_path, "--challenge", CHALLENGE, "--entrant", "me")
    assert again.returncode == 2


def test_hint_at_a_folder_that_cannot_be_written_fits_the_verb(trapline, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda _, mode, **__: mode != os.W_OK)
    said = trapline("deploy", "field", "--challenge", CHALLENGE, "--entrant", "me").stderr
    assert "is not writable; DIR names another place" in " ".join(said.split())
    (tmp_path / "field" / "me" / CHALLENGE).mkdir(parents=True)
    (tmp_path / "field" / "me" / CHALLENGE / "solution.py").touch()
    said = trapline("grade", "field", "--challenge", CHALLENGE).stderr
    assert "is not writable; --out names another place" in " ".join(said.split())


def test_deploy_makes_all_workspaces_or_none(trapline, tmp_path):
    last = list(load_all())[-1]
    trapline("deploy", tmp_path, "--challenge", last, "--entrant", "me")
    done = trapline("deploy", tmp_path, "--entrant", "me")
    assert done.returncode == 2
    assert [path.name for path in (tmp_path / "me").iterdir()] == [last]


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A field of two entrants, graded once."""
    root = tmp_path_factory.mktemp("graded")
    shutil.copytree(load(CHALLENGE).solution, root / "field" / "gold" / CHALLENGE)
    broken = root / "field" / "broken" / CHALLENGE
    broken.mkdir(parents=True)
    (broken / "solution.py").write_text("def beam_search(*args, **options): raise ValueError(0)\n")
    done = started("grade", "field", "--challenge", CHALLENGE, "--out", "run", "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout)


def test_the_grade_object(graded):
    _, result = graded
    assert set(result) == {"run", "cells"}
    broken, gold = result["cells"]
    assert (broken["entrant"], broken["state"], broken["letter"]) == ("broken", "fail", "F")
    assert (gold["entrant"], gold["state"]) == ("gold", "pass")
    assert set(gold["traps"].values()) == {"pass"}
    assert gold["score"] >= 90
    for cell in result["cells"]:
        assert cell["answer"] == "given"
        assert {"entrant", "challenge", "track", "state", "score", "letter"} <= set(cell)
        assert {"isolation", "dimensions", "traps"} <= set(cell)


def test_second_grade_grades_nothing(graded):
    root, _ = graded
    done = started("grade", "field", "--challenge", CHALLENGE, "--out", "run", cwd=root)
    assert done.returncode == 0
    assert "gold" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert len(list((root / "run" / "bundles").iterdir())) == 2


def test_a_bundle_is_replayed_and_a_changed_one_refused(graded, trapline):
    root, _ = graded
    for bundle in (root / "run" / "bundles").iterdir():
        done = started("replay", bundle)
        assert done.returncode == 0, done.stdout + done.stderr
    changed = root / bundle.name
    changed.write_text(bundle.read_text().replace("beam_search(", "beam_searcher(", 1))
    for verb in ("replay", "reproduce"):
        done = trapline(verb, changed)
        assert done.returncode == 4
        assert "was changed" in done.stderr


@pytest.mark.parametrize("text", ["{}", "", "no JSON"])
def test_a_file_that_is_no_bundle_is_not_called_changed(trapline, tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    for verb in ("replay", "reproduce"):
        done = trapline(verb, "x.json")
        assert (done.returncode, done.stderr) == (2, "trapline: x.json is not an evidence bundle\n")


def wait_for_a_running_cell(run, deadline):
    while time.monotonic() < deadline:
        if (run / "run.sqlite").exists() and "running" in Store(run).waiting().values():
            return
        time.sleep(0.1)


def test_interrupted_grade_resumes(tmp_path):
    folder = tmp_path / "field" / "gold" / CHALLENGE
    folder.mkdir(parents=True)
    shutil.copy(load(CHALLENGE).solution / "solution.py", folder)  # no tests of its own: quicker
    program = Path(sys.executable).with_name("trapline")
    command = [str(program), "grade", "field", "--challenge", CHALLENGE, "--out", "run"]
    grader = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for_a_running_cell(tmp_path / "run", time.monotonic() + 600)
    grader.send_signal(signal.SIGINT)
    _, errors = grader.communicate(timeout=300)
    assert grader.returncode == 130
    assert "interrupted; what was finished is kept, the same command goes on" in errors
    assert "Traceback" not in errors
    assert started(*command[1:], cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        ((), "nothing is kept"),
        (("--red-team",), "nothing is kept"),
        (("--diagnosis",), "nothing is kept"),
        (("--diagnosis", "--write", "f.md"), "challenges that were finished are written"),
        (("--dictionary",), "challenges that were finished are written"),
    ],
)
def test_interrupted_certify_says_what_is_kept(tmp_path, monkeypatch, args, kept):
    from typer.testing import CliRunner

    from trapline.arena.errors import InterruptedRunError
    from trapline.cli import certify

    def interrupted(*_, **__):
        raise InterruptedRunError

    monkeypatch.chdir(tmp_path)
    for name in ("_certify_by_attack", "_write_dictionaries", "_certify_diagnosis", "_certify"):
        monkeypatch.setattr(certify, name, interrupted)
    narrowed = () if "--red-team" in args else ("--challenge", CHALLENGE)
    done = CliRunner().invoke(build("certify"), ["certify", *args, *narrowed])
    assert isinstance(done.exception, InterruptedRunError)
    assert done.exception.then == f"{kept}, the same command begins anew"


def test_a_misspelt_key_is_named(tmp_path):
    from trapline.arena.challenge import Challenge
    from trapline.arena.errors import UsageError

    text = (load(CHALLENGE).folder / "challenge.toml").read_text()
    (tmp_path / "challenge.toml").write_text(text.replace("difficulty", "dificulty"))
    with pytest.raises(UsageError, match="dificulty"):
        Challenge(tmp_path, "nothing")


def test_missing_isolation_level_is_refused(monkeypatch):
    from trapline.arena.errors import MissingError
    from trapline.arena.runs import executor

    monkeypatch.setattr(executor, "probe", lambda: ("process",))
    with pytest.raises(MissingError, match="bubblewrap"):
        executor.choose_level("bubblewrap")
