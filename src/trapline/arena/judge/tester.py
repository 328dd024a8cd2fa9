"""The program that runs a submission's own tests inside a sandbox, on whatever text of
`solution.py` it is given.

Each run is a fork of one warm process, so pytest and NumPy are imported once. A run that hangs
is ended.
"""

import contextlib
import gc
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from typing import Any

MAX_REPORT = 1 << 20


class Counter:
    """A pytest plugin: what was collected, what passed, what failed first."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {"collected": 0, "passed": 0, "failed": 0, "first": ""}

    def pytest_collection_finish(self, session: Any) -> None:
        self.report["collected"] = len(session.items)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._failed(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed(report)
        elif report.when == "call" and report.passed:
            self.report["passed"] += 1

    def _failed(self, report: Any) -> None:
        self.report["failed"] += 1
        self.report["first"] = self.report["first"] or f"{report.nodeid}: {report.longrepr}"[:600]


def run_tests(folder: str, stop_early: bool, explained: bool) -> dict[str, Any]:
    """The suite in `folder`, with our configuration and without the submission's conftest."""
    import pytest

    counter = Counter()
    os.chdir(folder)
    sys.path.insert(0, folder)
    options = [*_options(folder), "--assert=rewrite" if explained else "--assert=plain"]
    if stop_early:
        options.append("-x")
    counter.report["code"] = int(pytest.main(options, plugins=[counter]))
    return counter.report


def _options(folder: str) -> list[str]:
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", folder]
    # Collection starts at `confcutdir`, which is the folder of the configuration (/dev) by default:
    # a sandbox may forbid to list what lies between that and the suite.
    return [*options, "-c", os.devnull, "--confcutdir", folder, "--import-mode=prepend", folder]


def warm_up() -> None:
    """Does before the first fork what every run would do again: half of an empty run's time.

    pytest imports its plugins when it runs, NumPy its generators when they are asked for, and a
    collection of garbage after a fork copies every page that holds an object.
    """
    import numpy.random
    import numpy.testing  # noqa: F401
    import pytest

    empty = os.path.join(os.getcwd(), "empty")
    os.mkdir(empty)
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(_options(empty))
    os.rmdir(empty)
    gc.collect()
    gc.freeze()


def run_variant(submission: str, place: str, source: str | None, question: dict[str, Any]) -> Any:
    """The report of one run in a fork of its own, or None when it gave none in time."""
    shutil.copytree(submission, place)
    if source is not None:
        path = os.path.join(place, "solution.py")
        os.chmod(path, 0o600)
        with open(path, "w", encoding="utf-8") as file:
            file.write(source)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        wanted = question["stop_early"], question["explained"]
        _quietly(lambda: run_tests(place, *wanted), writing)
    os.close(writing)
    try:
        return _report(reading, time.monotonic() + question["seconds"])
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        shutil.rmtree(place, ignore_errors=True)


def _quietly(work: Any, writing: int) -> None:
    """In the fork: do it, write the report, end without exit handlers."""
    try:
        os.write(writing, json.dumps(work()).encode()[:MAX_REPORT])
    finally:
        os._exit(0)


def _report(reading: int, deadline: float) -> Any:
    text = b""
    while len(text) <= MAX_REPORT:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            break
        text += chunk
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> None:
    """`tester.py FD SUBMISSION_FOLDER`: answers questions until the channel closes."""
    import wire

    channel = wire.Channel(socket.socket(fileno=int(sys.argv[1])))
    warm_up()
    channel.send({"op": "ready"})
    scratch = os.getcwd()
    while True:
        try:
            question, body = channel.receive()
        except wire.WireError:
            return
        source = bytes(body).decode() if question["replaced"] else None
        # A name that says nothing about what is tested in it.
        place = os.path.join(scratch, question["nonce"])
        report = run_variant(sys.argv[2], place, source, question)
        channel.send({"op": "tested", "nonce": question["nonce"], "report": report})


if __name__ == "__main__":
    main()
