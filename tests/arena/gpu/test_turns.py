"""Whose turn it is on a GPU: checks share it, what is timed has it alone."""

import fcntl
import os
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from trapline.arena.errors import ArenaError, SubmissionDied, Violation
from trapline.arena.gpu import rig, turns
from trapline.arena.gpu.contract import Entry
from trapline.arena.gpu.judge import RefusedError
from trapline.arena.gpu.rig import GpuSubmission, Rig
from trapline.arena.judge.checks import run_checks
from trapline.arena.process.isolation.spec import SandboxLimits
from trapline.arena.process.session import SandboxConfig
from trapline.arena.record import CheckResult

#: A grader: takes turns until its time is over, and prints when each began and ended.
GRADER = """
import sys, time
from trapline.arena.gpu import turns
kind, gpu = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + 1.5
while time.monotonic() < until:
    with getattr(turns, kind)(gpu):
        begun = time.monotonic()
        time.sleep(0.02)
        print(kind, begun, time.monotonic(), flush=True)
"""


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return "one"


def grader(kind, gpu):
    process = subprocess.Popen(
        [sys.executable, "-c", GRADER, kind, gpu],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_what_is_timed_overlaps_nothing_and_is_not_starved(gpu):
    """Four graders that check all the time beside two that time."""
    graders = [grader(kind, gpu) for kind in ("beside",) * 4 + ("alone",) * 2]
    for one in graders:
        one.stdin.write("\n")
        one.stdin.flush()
    said = [line.split() for one in graders for line in one.communicate()[0].splitlines()]
    intervals = [(kind, float(begun), float(ended)) for kind, begun, ended in said]
    timed = [one for one in intervals if one[0] == "alone"]
    checks = [one for one in intervals if one[0] == "beside"]
    for one in timed:
        assert [other for other in intervals if other[1] < one[2] and one[1] < other[2]] == [one]
    assert len(timed) >= 10
    assert len(checks) >= 5


def test_a_killed_grader_leaves_the_gpu(gpu, monkeypatch):
    code = f"import time\nfrom trapline.arena.gpu import turns\nwith turns.alone({gpu!r}):\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "    print(1, flush=True)\n    time.sleep(60)\n"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"1\n"
    before, flock = turns.waited(), fcntl.flock

    def kill_soon(fd, kind):
        monkeypatch.setattr(fcntl, "flock", flock)
        threading.Timer(0.2, process.kill).start()
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", kill_soon)
    with turns.alone(gpu):
        process.communicate()
    assert turns.waited() - before >= 0.2


def test_a_thread_does_not_wait_for_itself(gpu):
    first, second = turns.share(gpu), turns.share(gpu)
    with pytest.raises(ArenaError, match="while an answer's process"), turns.alone(gpu):
        pass
    first.leave()
    second.leave()
    with turns.alone(gpu), turns.alone(gpu), turns.beside(gpu):
        assert turns.share(gpu) is None


def test_company_is_noticed_whoever_came_first(gpu):
    room = turns.Shared(gpu)
    assert not room.had_company()
    other = turns.Shared(gpu)
    assert room.had_company()
    assert other.had_company()
    turns._held.turns.clear()
    for one in (room, other):
        os.close(one._room)
    with turns.beside(gpu):
        assert not turns._held.turns[gpu].had_company()


class Session:
    """In place of a runner, which takes seconds to start."""

    def __init__(self, *_):
        self.closed = False

    def ask(self, *_):
        return {"missing": []}, b""

    def close(self):
        self.closed = True


@pytest.fixture
def submission(gpu, tmp_path):
    folder = tmp_path / "answer"
    folder.mkdir()
    (folder / "solution.py").write_text("def double(x, y):\n    y.copy_(2 * x)\n")
    limits = SandboxLimits(memory_mb=4096, processes=64, file_mb=256)
    config = SandboxConfig("process", limits, 30.0, ("torch",), device="cpu")
    with Rig("cpu") as own:
        own.gpu = gpu
        yield lambda **options: GpuSubmission(folder, config, {}, own, **options)


def test_nothing_is_timed_beside_an_answers_process(submission, monkeypatch):
    monkeypatch.setattr(rig, "Session", Session)
    with submission() as answer:
        answer.start(())
        turn = turns._held.turns[answer.rig.gpu]
        answer.start(())
        assert turns._held.turns[answer.rig.gpu] is turn
        with pytest.raises(ArenaError), turns.alone(answer.rig.gpu):
            pass
        with answer.alone():
            answer.start(())
            assert answer.turn is None
    with turns.alone(answer.rig.gpu), submission(ours=True) as gold:
        gold.start(())


class Doubtful:
    """A check that dies, or is wrong, as long as another answer uses the GPU."""

    dimension = "correctness"

    def __init__(self, name, error):
        self.id, self.error, self.asked = name, error, 0

    def run(self, submission, _):
        self.asked += 1
        if turns._held.alone:
            return
        exchange = SimpleNamespace(returned=not isinstance(self.error, SubmissionDied))
        submission.transcript.exchanges.append(exchange)
        raise self.error


@pytest.mark.parametrize("company", [True, False])
def test_a_death_beside_others_is_repeated_alone(submission, company):
    died = Doubtful("died", SubmissionDied("no memory"))
    wrong = Doubtful("wrong", Violation("wrong number"))
    with submission() as answer:
        answer._had_company = company
        results = run_checks([died, wrong], answer, 1)
    states = {result.id: result.state for result in results}
    assert states == {"died": "pass" if company else "fail", "wrong": "fail"}
    assert (died.asked, wrong.asked) == (2 if company else 1, 1)
    assert all(isinstance(result, CheckResult) for result in results)


def test_the_judge_waits_for_memory_that_others_hold(monkeypatch):
    with Rig("cpu", local=True) as own:
        create, short = own.judge.create, [1, 2]

        def busy(size):
            if short:
                short.pop()
                raise RefusedError("out of memory")
            return create(size)

        monkeypatch.setattr(own.judge, "create", busy)
        own.give([own.take(1)])
        assert not short
        monkeypatch.setattr(rig, "MEMORY_SECONDS", 0.0)
        short += range(10)
        with pytest.raises(RefusedError, match="out of memory"):
            own.take(1 << 20)
        assert len(short) < 10


def test_huge_buffers_and_the_runner_that_maps_them_go_at_once(submission, monkeypatch):
    monkeypatch.setattr(rig, "Session", Session)
    monkeypatch.setattr(rig, "HUGE", 1 << 20)
    with submission() as answer:
        answer.entries = {"double": Entry(lambda x: ())}
        monkeypatch.setattr(answer, "tell", lambda *_: {})
        monkeypatch.setattr(answer, "frozen", nullcontext)
        for size, ended in ((8, False), (1 << 19, True)):
            answer.start(())
            with suppress(IndexError):  # it has no outputs
                answer._run("double", (np.zeros(size, np.float32),))
            assert answer._session.closed is ended
            assert bool(answer.rig._all) is not ended
