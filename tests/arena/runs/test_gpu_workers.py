"""Processes that grade GPU cells side by side."""

import math
import os
import threading
import time
from types import SimpleNamespace

import pytest

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.gpu import yardsticks
from trapline.arena.runs import gpu_workers
from trapline.arena.runs.gpu_workers import GpuWorkers, LostError


@pytest.fixture(scope="module")
def workers():
    place = GpuWorkers(2)
    yield place
    place.close()


def refuse(reason):
    raise UsageError(reason)


def test_a_worker_serves_one_request_after_another(workers):
    pid = workers.run(os.getpid)
    assert pid != os.getpid()
    assert workers.run(os.getpid) == pid


def test_what_a_worker_raises_comes_back(workers):
    with pytest.raises(ArenaError, match="ValueError: math domain error"):
        workers.run(math.sqrt, -1)
    with pytest.raises(UsageError, match="not like this"):
        workers.run(refuse, "not like this")


def test_what_one_worker_measures_is_known_to_all(workers, monkeypatch):
    monkeypatch.setattr(yardsticks, "_known", {})
    workers.run(yardsticks.recall, {"lights": {"copy": 4e12}})
    assert yardsticks.known() == {"lights": {"copy": 4e12}}
    assert workers.run(yardsticks.known)["lights"] == {"copy": 4e12}


def test_a_worker_that_ends_is_our_failure_and_another_takes_over(workers, monkeypatch):
    with pytest.raises(LostError, match="the process that graded it ended"):
        workers.run(os._exit, 1)
    assert workers.run(os.getpid) != os.getpid()

    def lost(*_):
        raise LostError("ended")

    monkeypatch.setattr(workers, "_ask", lost)
    monkeypatch.setattr(gpu_workers, "replace", lambda request, **new: new)
    monkeypatch.setattr(gpu_workers, "grade", lambda request, challenge: (request, challenge))
    cell = workers.grade(SimpleNamespace(), "challenge", print)
    assert cell == ({"trouble": "ended"}, "challenge")
    monkeypatch.setattr(workers, "_closed", True)
    with pytest.raises(LostError):  # interrupted: the cell is no failure, it stays to be graded
        workers.grade(SimpleNamespace(), "challenge", print)


def test_closing_ends_workers_in_the_middle_of_a_request():
    place, seen = GpuWorkers(1), []

    def wait():
        try:
            place.run(time.sleep, 60)
        except LostError as lost:
            seen.append(str(lost))

    thread = threading.Thread(target=wait)
    thread.start()
    while not place._busy:
        time.sleep(0.01)
    (worker,) = place._busy
    place.close()
    thread.join()
    assert seen
    assert worker.process.poll() is not None
