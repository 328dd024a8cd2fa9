"""One conversation with one worker process: start it, ask, answer its callbacks, end it."""

import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.errors import ArenaError, SubmissionDied, SubmissionHung, SubmissionRaised
from trapline.arena.process import wire
from trapline.arena.process.sandbox import Launch, RunningSandbox, SandboxLimits, launch
from trapline.arena.process.time_limit import TimeLimit
from trapline.arena.record import Level
from trapline.arena.scope import WHOLE, Scope

#: From starting the process to its first word, before the submission is touched: that time is ours.
HANDSHAKE_SECONDS = 60.0
IMPORT_SECONDS = 60.0
#: A check keeps what it is called back with, so that must not grow for ever.
MAX_CALLED_BACK = 256 << 20
#: Compilers of GPU code keep their results there.
_GPU_SCRATCH_MB = 1024
Header = dict[str, Any]
Callback = Callable[[Header, np.ndarray], tuple[Header, list[Any]]]


@dataclass(frozen=True)
class SandboxConfig:
    """Where and under which limits a submission runs."""

    level: Level
    limits: SandboxLimits
    call_seconds: float
    packages: tuple[str, ...] = ()
    #: The module that offers the contract's calls: the solution itself, or its adapter.
    entry: str = "solution"
    #: What the submission was asked for.
    scope: Scope = WHOLE
    #: The device of the GPU track: `cuda`, or `cpu` for its stand-in; empty on the CPU track.
    device: str = ""
    #: Of a time limit, the share that may be processor time: an endless loop is then known early
    #: and on a busy machine as on an idle one. 1: only the clock counts.
    processor_share: float = 1.0


class ForgeryError(SubmissionDied):
    """A frame that the protocol cannot explain: something else wrote on the channel."""


class Session:
    """A running program inside a sandbox: `worker`, `tester` or `inspector`."""

    def __init__(self, folder: Path, config: SandboxConfig, program: str = "worker") -> None:
        self.config = config
        self.running, self._channel, self._descriptors = _connect(program, folder, config)
        self.closed = False
        #: Seconds in which the call that came last was seen to wait for a processor.
        self.waited = 0.0
        try:
            self._expect_ready()
        except ArenaError:
            self.close()
            raise

    def _expect_ready(self) -> None:
        """The handshake: before it a failure is ours, after it the submission's."""
        try:
            header, _ = self._channel.receive(time.monotonic() + HANDSHAKE_SECONDS)
        except wire.WireError as error:
            raise ArenaError(f"the sandbox did not start: {error}; {self._last_words()}") from None
        if header.get("op") != "ready":
            raise ArenaError("the sandbox started something else than its program")

    def load(self, entries: Sequence[str] = ()) -> list[str]:
        """Has the worker import the submission; returns the entry points that it lacks."""
        question = {"op": "import", "module": self.config.entry, "entries": list(entries)}
        reply, _ = self.ask(question, (), IMPORT_SECONDS)
        missing = reply.get("missing")
        if not isinstance(missing, list):
            return list(entries)
        return [printable(str(name)) for name in missing]

    def hand_over(self, descriptor: int) -> None:
        """Sends a descriptor of ours; the program takes it when it is told to."""
        assert self._descriptors is not None
        try:
            socket.send_fds(self._descriptors, [b"!"], [descriptor])
        except OSError as error:
            raise SubmissionDied(self._why(str(error))) from None

    def ask(
        self,
        header: Header,
        buffers: tuple[Any, ...] | list[Any],
        seconds: float,
        on_callback: Callback | None = None,
        most_share: float = 1.0,
    ) -> tuple[Header, np.ndarray]:
        """Sends a request and returns its answer, serving callbacks in between.

        `most_share`: how much of `seconds` may be processor time; the configuration may say less.
        """
        limit = TimeLimit(
            seconds,
            min(self.config.processor_share, most_share),
            self.running.processes,
            self.running.processor_seconds,
        )
        called_back = 0
        try:
            self._refuse_unasked()
            self._say(header, buffers, limit.deadline)
            while True:
                self._await_frame(limit)
                reply, body = self._hear(limit.transfer_deadline())
                if reply["op"] != "callback":
                    break
                if on_callback is None:
                    raise ForgeryError("called back where no function had been lent")
                called_back += self._channel.last_bytes
                if called_back > MAX_CALLED_BACK:
                    raise SubmissionDied(f"called back with more than {MAX_CALLED_BACK >> 20} MiB")
                answer, answer_buffers = on_callback(reply, body)
                self._say(answer, answer_buffers, limit.transfer_deadline())
        except wire.DeadlineError:
            self.close()
            raise SubmissionHung(f"no answer within {seconds:g} s") from None
        except wire.WireError as error:
            reason = self._why(str(error))
            self.close()
            raise SubmissionDied(reason) from None
        except BaseException:
            # A check gave up in the middle of a callback: the worker still waits for its answer.
            self.close()
            raise
        finally:
            self.waited = limit.waited
        raised = _raised(reply)
        if raised is not None:
            raised.reply = reply, body
            raise raised
        return reply, body

    def _say(self, header: Header, buffers: Any, deadline: float) -> None:
        self._nonce = secrets.token_hex(8)
        self._channel.send({**header, "nonce": self._nonce}, buffers, deadline)

    def _await_frame(self, limit: TimeLimit) -> None:
        """Returns when something has come; gives up on processes that have used up their time."""
        channel = select.poll()
        channel.register(self._channel.sock, select.POLLIN)
        while not limit.is_over():
            if self._channel.early or channel.poll(1000 * limit.until_next_look()):
                return
        raise wire.DeadlineError("no answer in time")

    def _hear(self, deadline: float) -> tuple[Header, np.ndarray]:
        header, body = self._channel.receive(deadline)
        if header.get("nonce") != self._nonce or not isinstance(header.get("op"), str):
            raise ForgeryError("an answer to a question that was not asked")
        return header, body

    def _refuse_unasked(self) -> None:
        """Nothing may lie in the channel before we ask: an early answer is a forged one."""
        sock = self._channel.sock
        sock.setblocking(False)
        try:
            if self._channel.early or sock.recv(1, socket.MSG_PEEK):
                raise ForgeryError("spoke before it was asked")
        except BlockingIOError:
            return
        except OSError as error:
            raise wire.WireError(str(error)) from None
        raise wire.WireError("the channel closed")

    def _why(self, error: str) -> str:
        for _ in range(50):
            if not self.running.alive():
                break
            time.sleep(0.01)
        reason = self.running.reason() if not self.running.alive() else error
        return f"the process ended: {reason}; {self._last_words()}"

    def _last_words(self) -> str:
        words = self.running.output().strip()
        return f"it printed: …{words[-300:]!r}" if words else "it printed nothing"

    def peak_bytes(self) -> int:
        """The kernel's figure for everything the submission holds, lent memory included."""
        assert self._channel.take is not None
        return self.running.peak_bytes() + self._channel.take.in_use()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.running.kill()
        self._channel.sock.close()
        if self._descriptors is not None:
            self._descriptors.close()
        for lent in (self._channel.give, self._channel.take):
            if lent is not None:
                lent.close()


def _connect(
    program: str, folder: Path, config: SandboxConfig
) -> tuple[RunningSandbox, wire.Channel, socket.socket | None]:
    """Starts the program; a worker, which moves large arrays, is lent memory for them, and a
    runner of the GPU track gets a second line over which descriptors of buffers come."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    scratch = _GPU_SCRATCH_MB if config.device else Launch.scratch_mb
    with theirs:
        running = launch(
            Launch(
                *(config.level, program, folder, theirs, config.limits, config.packages),
                scratch_mb=scratch,
                gpu=bool(config.device),
            )
        )
    if program == "worker":
        give, take = wire.Lender(), wire.Lender()
        socket.send_fds(ours, [b"!"], [give.fd, take.fd])
        return running, wire.Channel(ours, give, take), None
    if program == "gpu_runner":
        line, far_end = socket.socketpair()
        with far_end:
            socket.send_fds(ours, [b"!"], [far_end.fileno()])
        return running, wire.Channel(ours), line
    return running, wire.Channel(ours), None


def printable(text: str) -> str:
    """What a submission says, without control characters."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _raised(reply: Header) -> SubmissionRaised | None:
    if reply["op"] != "raised":
        return None
    bases = reply.get("bases")
    names = tuple(str(base) for base in bases) if isinstance(bases, list) else ()
    kind, message, where = (
        printable(str(reply.get(key, ""))[:2000]) for key in ("kind", "message", "where")
    )
    return SubmissionRaised(kind, names[:64], message, where[:200])
