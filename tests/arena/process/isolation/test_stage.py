import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.process.isolation import stage
from trapline.arena.process.isolation.stage import SandboxStage

PROGRAM = Path(__file__).with_name("attacker.py")


@pytest.fixture
def submission(tmp_path):
    folder = tmp_path / "submission"
    (folder / "deep").mkdir(parents=True)
    (folder / "solution.py").write_text("x = 1\n")
    (folder / "deep" / "more.py").write_text("y = 2\n")
    return folder


@pytest.fixture
def staged(submission):
    made = []

    def make():
        made.append(SandboxStage(PROGRAM, submission))
        return made[-1]

    yield make
    for one in made:
        one.remove()


def test_plain_files_and_folders_are_copied(staged):
    copy = staged().submission
    assert (copy / "solution.py").read_text() == "x = 1\n"
    assert (copy / "deep" / "more.py").read_text() == "y = 2\n"


def test_links_and_pipes_are_not_copied(staged, submission):
    (submission / "secret").symlink_to("/etc/passwd")
    (submission / "folder").symlink_to("/etc")
    os.mkfifo(submission / "pipe")
    copy = staged().submission
    assert sorted(path.name for path in copy.iterdir()) == ["deep", "solution.py"]


def test_too_many_files_are_refused(staged, submission, monkeypatch):
    monkeypatch.setattr(stage, "_MOST_FILES", 1)
    with pytest.raises(ArenaError, match="more files"):
        staged()


def test_missing_submission_is_a_usage_error(tmp_path):
    before = set(Path(tempfile.gettempdir()).glob(f"trapline-sandbox-{os.getpid()}-*"))
    with pytest.raises(UsageError, match="no submission folder"):
        SandboxStage(PROGRAM, tmp_path / "nowhere")
    after = set(Path(tempfile.gettempdir()).glob(f"trapline-sandbox-{os.getpid()}-*"))
    assert after == before


def test_locked_scratch_folder_is_removed(staged):
    made = staged()
    locked = made.scratch / "locked" / "deep"
    locked.mkdir(parents=True)
    (made.scratch / "away").symlink_to("/etc")
    before = Path("/etc").stat().st_mode
    locked.parent.chmod(0)
    made.remove()
    assert not made.root.exists()
    assert Path("/etc").stat().st_mode == before


def test_stages_of_killed_controllers_are_removed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = Path(tempfile.mkdtemp(prefix=f"trapline-sandbox-{ended.pid}-"))
    ours = Path(tempfile.mkdtemp(prefix=f"trapline-sandbox-{os.getpid()}-"))
    stage.remove_leftovers()
    assert not folder.exists()
    assert ours.exists()
    ours.rmdir()


def test_program_is_compiled_once(staged, monkeypatch):
    first = staged()
    monkeypatch.setattr("builtins.compile", None)
    second = staged()
    codes = [sorted((made.root / "program").rglob("*.pyc")) for made in (first, second)]
    assert [path.name for path in codes[0]] == [path.name for path in codes[1]] != []
    assert first.inside in codes[0]
