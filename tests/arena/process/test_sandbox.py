"""Which levels there are, and that a level is claimed only where it holds."""

import os
import socket
import sys
from pathlib import Path

import pytest

from trapline.arena.errors import ArenaError, MissingError, UsageError
from trapline.arena.process import sandbox
from trapline.arena.process.isolation import bubblewrap, interpreter, process
from trapline.arena.process.sandbox import Launch

HONEST = """
import socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
channel.sendall(sys.argv[2].encode() + b"\\n")
channel.recv(1)
"""


@pytest.fixture
def honest(tmp_path):
    path = tmp_path / "honest.py"
    path.write_text(HONEST)
    return path


@pytest.fixture
def forgotten():
    """What has been found out about this machine is forgotten, before and after."""
    sandbox._way.cache_clear()
    yield
    sandbox._way.cache_clear()


def test_process_level_is_always_available_and_weakest():
    assert sandbox.probe()[-1] == "process"


def test_levels_come_strongest_first():
    order = ["bubblewrap", "landlock", "process"]
    assert list(sandbox.probe()) == [level for level in order if level in sandbox.probe()]


def test_missing_program_makes_a_missing_level(forgotten, monkeypatch, honest, tmp_path):
    def absent():
        raise MissingError("bubblewrap (bwrap) is not installed")

    monkeypatch.setattr(bubblewrap, "_executable", absent)
    assert "bubblewrap" not in sandbox.probe()
    assert "not installed" in sandbox.why_not("bubblewrap")
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(MissingError, match="bubblewrap"):
        sandbox.launch(Launch("bubblewrap", honest, tmp_path, theirs))


def test_level_that_lets_our_source_be_read_is_not_offered(forgotten, monkeypatch):
    leaky = {**sandbox._WAYS, "bubblewrap": (process.command,)}
    monkeypatch.setattr(sandbox, "_WAYS", leaky)
    assert "it can read" in sandbox.why_not("bubblewrap")


def test_sandbox_that_does_not_start_says_what_it_printed(forgotten, monkeypatch, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no interpreter to be found')")
    monkeypatch.setattr(sandbox, "_SELFTEST", broken)
    assert sandbox.why_not("process") == "did not start (no interpreter to be found)"


@pytest.mark.parametrize("report", ["trapline", "socket", "writable", "signals"])
def test_each_power_of_the_self_test_rejects_the_level(report):
    clean = {"numpy": True, "readable": [], "user": 65534, "cuda": ""}
    powers = {"trapline": False, "socket": False, "writable": False, "signals": False}
    assert sandbox._objection("landlock", {**clean, **powers}) == ""
    assert report in sandbox._objection("landlock", {**clean, **powers, report: True})


def test_root_inside_missing_numpy_and_missing_cuda_are_objections():
    report = {"numpy": True, "readable": [], "user": 0, "cuda": ""}
    report |= {"trapline": False, "socket": False, "writable": False, "signals": False}
    assert sandbox._objection("landlock", report) == "it runs as root"
    assert "NumPy" in sandbox._objection("process", {**report, "numpy": False})
    assert "cuInit" in sandbox._objection("process", {**report, "cuda": "cuInit returned 100"})


def test_way_without_cuda_inside_is_not_taken_for_a_gpu(forgotten):
    if interpreter.gpu_devices():
        pytest.skip("CUDA starts here")
    assert "CUDA does not start inside: libcuda" in sandbox._way("process", gpu=True)[1][0]


def test_channel_is_handed_over(honest, tmp_path):
    ours, theirs = socket.socketpair()
    with ours:
        running = sandbox.launch(Launch("process", honest, tmp_path, theirs))
        try:
            assert theirs.fileno() == -1
            folder = ours.makefile().readline().strip()
            assert Path(folder, "honest.py").read_text() == HONEST
            assert running.alive()
        finally:
            running.kill()
        assert not Path(folder).exists()
        running.kill()
        assert ours.recv(1) == b""


def test_mistake_of_the_caller_leaves_nothing_behind(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(UsageError, match="no program"):
        sandbox.launch(Launch("process", tmp_path / "nowhere.py", tmp_path, theirs))


def test_forked_controller_can_start_sandboxes_of_its_own(honest, tmp_path):
    sandbox.why_not("process")
    child = os.fork()
    if child == 0:
        os._exit(_starts_one(honest, tmp_path))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _starts_one(program, folder):
    ours, theirs = socket.socketpair()
    try:
        running = sandbox.launch(Launch("process", program, folder, theirs))
        said = ours.makefile().readline()
        running.kill()
    except (OSError, ArenaError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if said else 2
