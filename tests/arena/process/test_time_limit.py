"""Other programs on the machine cannot use up the time of a call."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from trapline.arena.errors import SubmissionHung
from trapline.arena.judge.own_tests import OWN, OwnTests
from trapline.arena.process import local, time_limit
from trapline.arena.process.local import TooLongError, limited
from trapline.arena.process.proxy import Submission
from trapline.arena.process.time_limit import MOST_ADDED, ProcessorWait, TimeLimit

SOURCE = """
    import time

    def work(seconds):
        start = time.process_time()
        while time.process_time() < start + seconds: pass
        return "done"
"""


class Machine:
    """A clock, the waiting and the processor time of one call, all set by hand."""

    def __init__(self, monkeypatch):
        self.now = self.waited = self.used = 0.0
        monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(time_limit, "ProcessorWait", lambda pids: self)

    def seconds(self):
        return self.waited

    def limit(self, seconds, share=1.0):
        return TimeLimit(seconds, share, list, lambda: self.used)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def over_at(machine, limit, *, waited=0.0, used=0.0, until=1000):
    """When the limit ends a call that waits and works for these shares of the time."""
    for machine.now in range(until):
        machine.waited, machine.used = waited * machine.now, used * machine.now
        if limit.is_over():
            return machine.now
    return None


@pytest.mark.parametrize(
    ("waited", "used", "end"),
    [
        (0.0, 0.0, 20),  # it sleeps
        (0.0, 1.0, 20),  # it works
        (0.5, 0.5, 40),  # it has half a processor
        (0.9, 0.1, 200),  # it has a tenth of one
        (1.0, 0.0, 20 * (1 + MOST_ADDED)),  # it never runs
        (0.5, 8.0, 22),  # it waits for its own threads
    ],
)
def test_waiting_for_a_processor_does_not_count(machine, waited, used, end):
    found = over_at(machine, machine.limit(20), waited=waited, used=used)
    assert found == pytest.approx(end, abs=1)


def test_share_of_processor_time_ends_a_call_early(machine):
    assert over_at(machine, machine.limit(20, 0.1), used=1.0) == pytest.approx(4, abs=1)


def test_short_call_is_not_looked_at(machine, monkeypatch):
    monkeypatch.setattr(time_limit, "ProcessorWait", None)
    machine.now = 0.4
    assert not machine.limit(20).is_over()


def test_process_that_has_ended_keeps_what_was_seen(monkeypatch):
    delays = {"1": 5.0, "2": 1.0}
    monkeypatch.setattr(time_limit, "_tasks", lambda folder: list(delays))
    monkeypatch.setattr(time_limit, "_delay", lambda path: delays.get(path.split("/")[0], 0.0))
    wait = ProcessorWait(lambda: [1])
    delays |= {"1": 7.0, "2": 4.0, "3": 2.5}
    assert wait.seconds() == 3.0
    del delays["2"]
    assert wait.seconds() == 3.0


def test_process_that_is_gone_counts_nothing():
    assert time_limit._tasks(f"/proc/{2**22 + 1}/task") == []
    assert time_limit._delay(f"/proc/{2**22 + 1}/schedstat") == 0.0


@pytest.mark.parametrize(("waited", "least"), [(0.0, 0.05), (0.2, 0.25)])
def test_limit_on_our_own_code_grants_its_waiting(monkeypatch, waited, least):
    class Waiting:
        def seconds(self):
            return waited

    monkeypatch.setattr(local, "ProcessorWait", Waiting)
    started = time.monotonic()
    with pytest.raises(TooLongError), limited(0.05):
        time.sleep(5)
    assert least <= time.monotonic() - started < 3


@pytest.fixture
def crowded():
    """A processor that seven programs want beside whatever is moved there."""
    place = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{place}])\nwhile True: pass"
    programs = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(7)]
    yield place
    for running in programs:
        running.kill()
        running.wait()


@pytest.mark.full
def test_crowded_processor_takes_no_time_of_a_call(submission_folder, sorting, level, crowded):
    """It needs 0.6 s of the second that it has, for which a processor shared by eight takes 5."""
    folder, config = submission_folder(SOURCE), sorting.sandbox_config(level, 1.0)
    with Submission(folder, config) as submission:
        for pid in submission.session.running.processes():
            os.sched_setaffinity(pid, [crowded])
        started = time.monotonic()
        assert submission.work(0.6) == "done"
        assert time.monotonic() - started > 1.5
        with pytest.raises(SubmissionHung):
            submission.work(1e9)


@pytest.mark.parametrize(("waited", "asked"), [(0.0, [30.0]), (45.0, [30.0, 75.0])])
def test_suite_that_waited_for_a_processor_runs_again_with_more_time(waited, asked):
    times = []

    class Busy:
        def __init__(self):
            self.waited = waited

        def ask(self, question, body, seconds):
            times.append(question["seconds"])
            return {"report": None}, None

    tests = OwnTests.__new__(OwnTests)
    tests._session = Busy()
    assert tests.run(OWN) is None
    assert times == asked
