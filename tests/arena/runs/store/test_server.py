"""A run on a server: what keeps us from it is said in one sentence, and never the password."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trapline.arena.errors import ArenaError, MissingError, UsageError
from trapline.arena.runs.store import Store
from trapline.cli.main import build


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs a reading verb in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(build(), list(args))


@pytest.fixture
def unreachable():
    """The URL of a server on a port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"postgresql://team:hunter2@127.0.0.1:{taken.getsockname()[1]}/evals"


def test_unreachable_server_is_one_sentence(postgres, unreachable):
    bad = {
        postgres.url(password="hunter2"): "password authentication failed",
        postgres.url(password=None): "password",
        postgres.url(database="nowhere"): 'database "nowhere" does not exist',
        postgres.url(nonsense="1"): "nonsense",
        unreachable: "refused",
        postgres.url(host=f"{postgres.folder}/absent"): "No such file",
    }
    for url, reason in bad.items():
        with pytest.raises(MissingError, match=r"^the store .* cannot be opened: ") as caught:
            Store(url)
        message = str(caught.value)
        assert reason in message
        assert "hunter2" not in message
        assert postgres.PASSWORD not in message
        assert "\n" not in message


def test_verb_reports_an_unreachable_server(postgres, unreachable, call, tmp_path):
    for args, kind, words in [
        (("rank", unreachable), MissingError, "cannot be opened"),
        (("rank", postgres.new_run()), UsageError, "holds no run"),
        (("rank", "mysql://team:hunter2@host/evals"), UsageError, "postgresql:// URL"),
        (("lint", "postgresql://team:hunter2@host"), UsageError, "cannot be read"),
        (("replay", "00", "--run", postgres.new_run()), UsageError, "holds no run"),
    ]:
        done = call(*args)
        assert isinstance(done.exception, kind)
        assert words in str(done.exception)
        assert "hunter2" not in str(done.exception) + done.output
        assert list(tmp_path.iterdir()) == []


def test_program_ends_with_a_sentence_and_a_code(unreachable, tmp_path):
    program = Path(sys.executable).with_name("trapline")
    command = [str(program), "rank", unreachable]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 3
    assert done.stderr.startswith("trapline: the store postgresql://team@127.0.0.1")
    assert "hunter2" not in done.stderr + done.stdout


def test_every_reading_verb_needs_nothing_but_the_url(postgres, call, tmp_path, make_bundle):
    url = postgres.new_run()
    store = Store(url)
    saved = [store.save(make_bundle(name, score=93.0)) for name in ("one", "two")]
    store.close()
    told = json.loads(call("rank", url, "--json", "--rounds", "10").output)
    assert [one["entrant"] for one in told["standings"]] == ["one", "two"]
    assert "tie" in call("duel", "one", "two", "--run", url).output
    assert call("lint", url, "--json").exit_code == 4
    replayed = call("replay", saved[0].bundle[:10], "--run", url)
    assert "unknown challenge 'sorting'" in str(replayed.exception)
    assert call("report", url, "--out", "site").exit_code == 0
    assert (tmp_path / "site" / "bundles" / f"{saved[0].bundle}.json").exists()
    assert call("report", url, "--format", "csv").exit_code == 0
    assert len(list(tmp_path.glob("*-report/cells.csv"))) == 1
    _assert_secret_nowhere(postgres, url, tmp_path)


def _assert_secret_nowhere(postgres, url, folder):
    spellings = {postgres.PASSWORD, url.partition("team:")[2].partition("@")[0]}
    for path in folder.rglob("*"):
        if path.is_file():
            assert not any(word in path.read_text(errors="replace") for word in spellings), path
    dump = Store(url, create=False)
    tables = [repr(dump.meta()), repr(dump.history()), dump.where, dump.name]
    dump.close()
    assert not any(word in text for word in spellings for text in tables)


def test_server_that_goes_away_is_one_sentence(postgres, make_bundle):
    url = postgres.new_run()
    store = Store(url)
    store.plan([("a", "sorting", "cpu", 1)])
    with store.grading():
        assert store.claim(("a", "sorting", "cpu", 1))
        postgres.stop(signal.SIGQUIT)
        try:
            for attempt in (lambda: store.save(make_bundle()), store.cells):
                with pytest.raises(ArenaError, match=r"^the store .* failed: ") as caught:
                    attempt()
                assert "\n" not in str(caught.value)
                assert postgres.PASSWORD not in str(caught.value)
        finally:
            postgres.start()
        # The lock went with the old connection: what this grader had is anybody's now.
        assert list(store.waiting().values()) == ["waiting"]
        with pytest.raises(ArenaError, match="no longer knows this grader"):
            store.claim(("a", "sorting", "cpu", 1))
    store.close()


def test_runs_of_one_database_do_not_see_each_other(postgres, make_bundle):
    one, two = (Store(postgres.new_run()) for _ in range(2))
    one.save(make_bundle())
    assert two.cells() == []
    for store in (one, two):
        store.close()


def test_missing_driver_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingError, match=r"trapline\[postgres\]"):
        Store("postgresql://host.invalid/evals")
