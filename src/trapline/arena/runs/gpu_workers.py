"""Grades GPU cells side by side: each in a process of ours, with a judge of its own.

Their checks share the GPU; what is timed has it alone (`gpu.turns`). A worker answers one request
after another over a socket. Both ends are this module: nothing that an answer made is read here. It
ends when the grader closes the socket or dies.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import ArenaError
from trapline.arena.gpu import turns, yardsticks
from trapline.arena.gpu.memory import device_here
from trapline.arena.gpu.opening import shared_rig
from trapline.arena.judge.grade import OnStep, grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.record import Bundle
from trapline.arena.runs.executor import LocalExecutor, Result

_STEP, _DONE, _FAILED = "step", "done", "failed"


class LostError(ArenaError):
    """A worker ended during a request."""


class GpuWorkers(LocalExecutor):
    """So many processes at most, started when they are needed."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    def grade(self, request: GradeRequest, challenge: Challenge, on_step: OnStep) -> Bundle:
        try:
            return self._ask(grade_here, (request,), on_step)
        except LostError as lost:
            if self._closed:  # interrupted: the cell stays to be graded
                raise
            return grade(replace(request, trouble=str(lost)), challenge)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        return self._ask(function, args, lambda step: None)

    def _ask(self, function: Callable[..., Result], args: Any, on_step: OnStep) -> Result:
        with self._lock:
            worker = self._idle.pop() if self._idle else _Worker()
            self._busy.add(worker)
        try:
            answer: Result = worker.ask(function, args, on_step)
        finally:
            with self._lock:
                self._busy.discard(worker)
                if worker.process.poll() is None:
                    self._idle.append(worker)
        return answer

    def close(self) -> None:
        with self._lock:
            workers = [*self._idle, *self._busy]
            self._idle.clear()
            self._closed = True
        for worker in workers:
            worker.close()


class _Worker:
    """The grader's end of one worker."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(filter(None, sys.path))
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from {__name__} import main; main()",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._socket, self._line = ours, Connection(os.dup(ours.fileno()))

    def ask(self, function: Callable[..., Any], args: Any, on_step: OnStep) -> Any:
        try:
            self._line.send((function, args, yardsticks.known()))
            kind, value, learned = self._line.recv()
            while kind == _STEP:
                on_step(value)
                kind, value, learned = self._line.recv()
        except (OSError, EOFError):
            self.close()
            raise LostError("the process that graded it ended") from None
        yardsticks.recall(learned)
        if kind == _FAILED:
            raise value
        return value

    def close(self) -> None:
        """The worker sees the end of the line, ends its sandboxes and itself."""
        with suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait of another thread, too
        self._socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# In the worker


def grade_here(request: GradeRequest, on_step: OnStep) -> Bundle:
    judge = load(request.challenge, request.track, request.profile, request.trap_set)
    return grade(request, judge, on_step)


def main() -> None:
    """`main FD`: one thread grades, this one waits for the end of the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the grader is interrupted, and closes the line
    line = Connection(int(sys.argv[1]))
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_serve, args=(line, requests), daemon=True).start()
    while True:
        try:
            requests.put(line.recv())
        except (OSError, EOFError):
            return


def _serve(line: Connection, requests: "queue.Queue[Any]") -> None:
    while True:
        function, args, known = requests.get()
        yardsticks.recall(known)
        keywords = {}
        if function is grade_here:
            keywords["on_step"] = lambda step: line.send((_STEP, step, {}))
        try:
            answer = _DONE, function(*args, **keywords)
        except ArenaError as error:
            answer = _FAILED, error
        except Exception as error:
            answer = _FAILED, ArenaError(f"{type(error).__name__}: {error}")
        rig = shared_rig(device_here())
        with turns.beside(rig.gpu):
            rig.trim()
        line.send((*answer, yardsticks.known()))
