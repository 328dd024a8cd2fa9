"""The program that runs a submission's own tests inside a sandbox, on whatever text of
its modules it is given.

pytest starts once, and stops where it would collect tests. Each run is a fork of that process,
which goes on from there. A run that hangs is ended.
"""

import contextlib
import gc
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
#: The folder of every run; pytest knows it before the first.
PLACE = "suite"


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


class Server:
    """A pytest plugin: answers questions where tests would be collected. In the fork of a run the
    hook returns, and pytest goes on."""

    def __init__(self, channel: Any, submission: str, place: str) -> None:
        self.channel, self.submission, self.place = channel, submission, place
        #: In the fork of a run: where its report goes, and what was asked.
        self.writing = -1
        self.question: dict[str, Any] = {}

    def pytest_collection(self, session: Any) -> bool | None:
        # A collection of garbage after a fork copies every page that holds an object.
        gc.collect()
        gc.freeze()
        os.rmdir(self.place)
        self.channel.send({"op": "ready"})
        while self.writing < 0:
            try:
                self.question, body = self.channel.receive()
            except Exception:  # the channel closed
                os._exit(0)
            self.run(bytes(body))
        session.config.option.maxfail = self.most_failures()
        return True if self.question["explained"] else None  # True: nothing is collected

    def most_failures(self) -> int:
        return 1 if self.question["stop_early"] else 0

    def run(self, texts: bytes) -> None:
        """Sends the report of a run; returns without it in the fork."""
        self.lay_out(texts)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.chdir(self.place)
            sys.path.insert(0, self.place)
            self.writing = writing
            return
        os.close(writing)
        try:
            report = _report(reading, time.monotonic() + self.question["seconds"])
        finally:
            os.close(reading)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.clear()
        nonce = self.question["nonce"]
        self.channel.send({"op": "tested", "nonce": nonce, "report": report})

    def lay_out(self, texts: bytes) -> None:
        """The submission; `texts` are those of the replaced files, one after the other."""
        shutil.copytree(self.submission, self.place)
        start = 0
        for name, length in self.question["replaced"]:
            path = os.path.join(self.place, name)
            os.chmod(path, 0o600)
            with open(path, "wb") as file:
                file.write(texts[start : start + length])
            start += length

    def clear(self) -> None:
        """The next run finds nothing of this one, even where it cannot be removed."""
        left = f"{self.place}-{self.question['nonce']}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.place, left)
        shutil.rmtree(left, ignore_errors=True)


def _options(folder: str) -> list[str]:
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", folder]
    # Collection starts at `confcutdir`, which is the folder of the configuration (/dev) by default:
    # a sandbox may forbid to list what lies between that and the suite.
    return [*options, "-c", os.devnull, "--confcutdir", folder, "--import-mode=prepend", folder]


def run_tests(server: Server) -> None:
    """Serves until the channel closes. The fork of a run writes its report and ends here.

    The suite runs with our configuration and without the submission's conftest.
    """
    # What suites import: NumPy loads its generators when they are asked for.
    import numpy.random
    import numpy.testing  # noqa: F401
    import pytest

    options = _options(server.place)
    os.chdir(server.place)
    try:
        counter = Counter()
        code = pytest.main([*options, "--assert=plain"], plugins=[counter, server])
        if server.question.get("explained"):  # which takes an import hook that plain runs lack
            counter, most = Counter(), f"--maxfail={server.most_failures()}"
            code = pytest.main([*options, "--assert=rewrite", most], plugins=[counter])
        counter.report["code"] = int(code)
        os.write(server.writing, json.dumps(counter.report).encode()[:MAX_REPORT])
    finally:
        if server.writing >= 0:  # without exit handlers
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
    import numpy_start

    numpy_start.import_numpy()
    import wire

    del sys.modules["wire"], sys.modules["numpy_start"]  # a submission may have such modules
    channel = wire.Channel(socket.socket(fileno=int(sys.argv[1])))
    place = os.path.join(os.getcwd(), PLACE)
    os.mkdir(place)
    run_tests(Server(channel, sys.argv[2], place))


if __name__ == "__main__":
    main()
