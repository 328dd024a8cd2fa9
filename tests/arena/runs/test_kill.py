"""Nothing lost: graders are killed, disks fill up, records rot, and the table stays the same."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trapline.arena.errors import UsageError
from trapline.arena.runs.store import Store

GRADER = Path(__file__).with_name("grader.py")


@pytest.fixture(scope="module")
def field(tmp_path_factory, sorting):
    """Five entrants: the gold solution and four of its mutants."""
    root = tmp_path_factory.mktemp("field")
    gold = {"solution.py": sorting.solution_files()["solution.py"]}
    mutants = {trap.id: trap.plant(gold) for trap in sorting.traps[:4]}
    for name, files in {"gold": gold, **mutants}.items():
        folder = root / name / "sorting"
        folder.mkdir(parents=True)
        (folder / "solution.py").write_text(files["solution.py"])
    return root


def start(field, run, **environment):
    command = [sys.executable, str(GRADER), str(field), str(run)]
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(field, run, **environment):
    grader = start(field, run, **environment)
    _, errors = grader.communicate(timeout=300)
    assert grader.returncode == 0, errors
    return table(run)


def table(run):
    store = Store(run, create=False)
    try:
        cells = store.cells()
        assert store.waiting() == {} or len(cells) < 5
        assert all(store.has_bundle(cell.bundle) for cell in cells)
        return [
            (c.entrant, c.state, c.score, tuple(c.fallen()), c.submission_digest) for c in cells
        ]
    finally:
        store.close()


@pytest.fixture(scope="module")
def undisturbed_run(field, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    finish(field, run)
    return run


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run):
    result = table(undisturbed_run)
    assert len(result) == 5
    assert len({fallen for _, _, _, fallen, _ in result}) == 5
    return result


def kept(run):
    """What is graded so far: nothing where a grader died before it had made a run."""
    try:
        return table(run)
    except UsageError:
        return []


def survive(field, run, rounds, chance, **environment):
    """Kills the grader at random moments; starts over when a run was completed."""
    before = []
    for _ in range(rounds):
        grader = start(field, run, **environment)
        time.sleep(chance.uniform(0.3, 4.0))
        grader.send_signal(signal.SIGKILL)
        grader.communicate()
        after = kept(run)
        assert set(before) <= set(after)
        before = after
        if len(after) == 5:
            shutil.rmtree(run)
            before = []


def test_killed_graders_lose_nothing(field, undisturbed, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.sqlite").touch()  # as by one that was killed before its first word
    assert kept(tmp_path / "run") == []
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    survive(field, tmp_path / "run", 8, random.Random(1), TMPDIR=str(temporary))
    assert finish(field, tmp_path / "run", TMPDIR=str(temporary)) == undisturbed
    assert leftovers(temporary) == []


def leftovers(temporary):
    """Whatever a run leaves in the temporary folder but the lock of timings."""
    return [path.name for path in temporary.iterdir() if path.suffix != ".timing"]


@pytest.mark.full
def test_two_hundred_killed_graders_lose_nothing(field, undisturbed, tmp_path):
    survive(field, tmp_path / "run", 200, random.Random(2))
    assert finish(field, tmp_path / "run") == undisturbed


def test_two_graders_share_a_run(field, undisturbed, tmp_path):
    graders = [start(field, tmp_path / "run") for _ in range(2)]
    printed = []
    for grader in graders:
        out, errors = grader.communicate(timeout=300)
        assert grader.returncode == 0, errors
        printed += out.split()
    assert sorted(printed) == [entrant for entrant, *_ in undisturbed]
    assert table(tmp_path / "run") == undisturbed


def test_grader_takes_over_what_a_killed_one_had(field, undisturbed, postgres, tmp_path):
    """Two graders on one server, one killed in the middle: the other does the rest alone."""
    run = postgres.new_run()
    killed = start(field, run)
    deadline = time.monotonic() + 300
    store = Store(run)
    while not (store.cells() or "running" in store.waiting().values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    store.close()
    other = start(field, run)
    # It had claimed something before the other came, so there is a line to wait for.
    assert killed.stdout.readline().strip() in {entrant for entrant, *_ in undisturbed}
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    _, errors = other.communicate(timeout=300)
    assert other.returncode == 0, errors
    assert table(run) == undisturbed
    assert graded_once(run)


def graded_once(run):
    store = Store(run, create=False)
    try:
        return sorted(cell.key for cell in store.history()) == [c.key for c in store.cells()]
    finally:
        store.close()


def test_server_that_dies_stops_the_grader_and_loses_nothing(field, undisturbed, postgres):
    run = postgres.new_run()
    grader = start(field, run)
    first = grader.stdout.readline().strip()
    postgres.stop()
    try:
        _, errors = grader.communicate(timeout=300)
    finally:
        postgres.start()
    assert grader.returncode == 1
    assert "trapline: the store postgresql://team@/postgres" in " ".join(errors.split())
    assert "Traceback" not in errors
    assert postgres.PASSWORD not in errors
    store = Store(run, create=False)
    assert first in {cell.entrant for cell in store.cells()}
    store.close()
    assert finish(field, run) == undisturbed
    assert graded_once(run)


def test_damaged_record_and_missing_bundle_are_graded_again(
    field, undisturbed, undisturbed_run, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed_run, run)
    with sqlite3.connect(run / "run.sqlite") as raw:
        raw.execute("UPDATE cells SET record = substr(record, 1, 100) WHERE entrant = 'gold'")
    victim = next((run / "bundles").iterdir())
    victim.write_text(victim.read_text()[:-10])
    assert finish(field, run) == undisturbed


def test_full_disk_stops_the_grader_and_loses_nothing(field, undisturbed, tmp_path):
    """A file-size limit stands for a full disk: writing fails in the middle of a file."""
    run = tmp_path / "run"
    command = f"ulimit -f 60; exec {sys.executable} {GRADER} {field} {run}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert finish(field, run) == undisturbed
