"""`--isolation` chooses the level of the verbs that run answers beside `grade`."""

import pytest
from typer.testing import CliRunner

from trapline.arena.errors import UsageError
from trapline.cli import replay, solve
from trapline.cli.main import build


def run(verb, *args):
    return CliRunner().invoke(build(verb), [verb, *args])


class Chosen(Exception):
    """Raised with the level that was asked for, before anything runs."""


def choose(required=None, exactly=None):
    raise Chosen(exactly)


@pytest.mark.parametrize("level", ["landlock", "process", None])
@pytest.mark.parametrize(
    ("module", "verb", "args"),
    [
        (replay, "replay", ["bundle.json"]),
        (solve, "solve", ["field", "--endpoint", "http://localhost:1/v1", "--model", "m"]),
    ],
)
def test_level_is_chosen(tmp_path, monkeypatch, module, verb, args, level):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "choose_level", choose)
    monkeypatch.setattr(replay, "read_evidence", lambda *_: None)
    ended = run(verb, *args, *(["--isolation", level] if level else []))
    assert isinstance(ended.exception, Chosen), ended.output
    assert ended.exception.args == (level,)


def test_agent_runs_at_no_level(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run("solve", "field", "--agent", "claude", "--model", "m", "--isolation", "landlock")
    assert isinstance(ended.exception, UsageError)
    assert "--isolation" in str(ended.exception)
