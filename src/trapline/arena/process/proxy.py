"""The submission as cases and traps see it: call its functions, get plain data back."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from trapline.arena.errors import (
    ArenaError,
    SubmissionDied,
    SubmissionHung,
    SubmissionRaised,
    Violation,
)
from trapline.arena.process import wire
from trapline.arena.process.ahead import SessionsAhead
from trapline.arena.process.session import ForgeryError, Header, SandboxConfig, Session, printable
from trapline.arena.process.time_limit import ProcessorWait
from trapline.arena.process.transcript import Exchange, Transcript
from trapline.arena.scope import Scope

#: Said of an object that is given to another process than the one that made it.
NOT_HERE = "the object died with its process"


class Stub:
    """A function or object that stays with the controller; the submission may call it."""

    def __init__(self, function: Callable[..., Any] | None = None, **methods: Callable[..., Any]):
        self.functions = {**methods, **({"": function} if function else {})}
        #: Every call so far: method name ("" for the function itself) and positional arguments.
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        #: What was asked and answered: method, positional and named arguments, answer.
        self.heard: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method not in self.functions:
            raise AttributeError(f"no method {method!r}")
        self.calls.append((method, args))
        answer = self.functions[method](*args, **kwargs)
        self.heard.append((method, args, kwargs, answer))
        return answer


class RemoteObject:
    """An object of the submission, such as a cache, that lives in the worker."""

    def __init__(self, submission: "Submission", session: Session, number: int, kind: str) -> None:
        self._submission, self._session = submission, session
        self._number, self._kind = number, kind

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._submission.call(name, args, kwargs, on=self)

    def __repr__(self) -> str:
        return f"<a {self._kind} of the submission>"


@dataclass(frozen=True)
class Sharing:
    """Whose memory the arrays of an answer use beside their own."""

    #: Places of the positional arguments.
    arguments: frozenset[int]
    #: An answer to an earlier call that was looked at in the same way.
    earlier_answer: bool

    @classmethod
    def of(cls, places: Sequence[int]) -> "Sharing":
        """From the list of places that `wire.AnsweredMemory` gives."""
        return cls(frozenset(place for place in places if place >= 0), wire.EARLIER in places)


#: A call without keywords: the object whose method it is, or None; the name; the arguments.
Ask = tuple[RemoteObject | None, str, tuple[Any, ...]]


class Submission:
    """One submission in one worker process, started when first needed and again after it died."""

    #: Code of ours, whose speed is known: a check that trains grants no time for slower trainers.
    is_ours = False

    def __init__(self, folder: Path, config: SandboxConfig, *, full: bool = False) -> None:
        self.folder, self.config = folder, config
        #: A full grade takes its time: a check that trains may train longer.
        self.full = full
        self._session: Session | None = None
        #: Where the first session comes from; None: it starts when it is needed.
        self._ahead: SessionsAhead | None = None
        #: How often a process of this submission ended or hung in the middle of a call.
        self.deaths = 0
        self.lost_seconds = 0.0
        #: Frames that no honest worker sends, in words.
        self.forgeries: list[str] = []
        #: The calls of the current check and their answers.
        self.transcript = Transcript()
        #: Of a call's time limit, the share that the current check allows as processor time.
        self.processor_share = 1.0
        #: Calls that are made together with the next one.
        self._later: list[Ask] = []
        self._fresh: list[Submission] = []
        self._fresh_ahead: SessionsAhead | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.call(name, args, kwargs)

    @property
    def scope(self) -> Scope:
        """What the submission was asked for."""
        return self.config.scope

    @property
    def session(self) -> Session:
        """The live session; starting one imports the submission."""
        if self._session is None or self._session.closed:
            self.start(())
        assert self._session is not None
        return self._session

    def start(self, entries: Sequence[str]) -> list[str]:
        """Starts a process and imports the submission; returns the entry points that it lacks."""
        self.close()
        ahead, self._ahead = self._ahead, None
        self._session = ahead.take() if ahead else Session(self.folder, self.config)
        try:
            return self._session.load(entries)
        except Violation as violation:
            self._session.close()
            self._note(violation)
            raise

    def _note(self, violation: Violation) -> None:
        if isinstance(violation, ForgeryError):
            self.forgeries.append(str(violation))

    def call(
        self,
        entry: str,
        args: Iterable[Any],
        kwargs: dict[str, Any],
        on: RemoteObject | None = None,
    ) -> Any:
        args = tuple(args)
        if self._later and not kwargs:
            (answer,) = self.call_all([(on, entry, args)])
            return answer
        self.make_later_calls()
        with self._recording(entry, args, kwargs, on) as exchange:
            exchange.answer = self._ask(entry, args, kwargs, on)
        return exchange.answer

    def call_later(self, asks: Iterable[Ask]) -> None:
        """Calls whose answers do not matter: they travel with the next message of this check.

        What one of them raises is a `Violation` then, never the exception that a later call is
        expected to raise.
        """
        self._later.extend(asks)

    def make_later_calls(self) -> None:
        """Makes the calls that still wait, those of fresh processes too."""
        for submission in (self, *self._fresh):
            submission.call_all(())

    def call_all(self, asks: Sequence[Ask]) -> Iterator[Any]:
        """The answers to several calls that travel in one message, each recorded as it is taken.

        No call is made after one that raises. All together have the time of one call; if the
        process dies, the last call is recorded as the one that it died in.
        """
        waiting, self._later = self._later, []
        asks = [*waiting, *asks]
        answers, trouble = self._ask_all(asks) if asks else ([], None)
        taken = self._taken(asks, answers, trouble)
        try:
            for _ in waiting:
                next(taken)
        except SubmissionRaised as raised:
            raise Violation(str(raised)) from None
        return taken

    def refilled(self, entry: str, *calls: tuple[np.ndarray, ...]) -> list[Any]:
        """The answers to several calls of a caller that keeps its arrays: before each one it fills
        them anew, with arrays of the same shapes."""
        self.make_later_calls()
        asks: list[Ask] = [(None, entry, args) for args in calls]
        return [*self._taken(asks, *self._ask_all(asks, refill=True), refilled=True)]

    def _taken(
        self,
        asks: Sequence[Ask],
        answers: list[Callable[[], Any]],
        trouble: Violation | None,
        *,
        refilled: bool = False,
    ) -> Iterator[Any]:
        for place, (on, entry, args) in enumerate(asks):
            with self._recording(entry, args, {}, on) as exchange:
                exchange.refilled = refilled
                if place == len(answers):
                    assert trouble is not None
                    raise trouble
                exchange.answer = answers[place]()
            yield exchange.answer

    def _ask_all(
        self, asks: Sequence[Ask], *, refill: bool = False
    ) -> tuple[list[Callable[[], Any]], Violation | None]:
        """What decodes each answer, and what ended the calls if there are fewer than asked."""
        try:
            return _Calls(self, asks, refill=refill).answers()
        except SubmissionDied as death:
            return lost(asks), death

    def observe(self, entry: str, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """The answer, and the positional arguments as the submission left them.

        Where the call raises, `SubmissionRaised.left` holds the arguments.
        """
        self.make_later_calls()
        with self._recording(entry, args, kwargs, None) as exchange:
            exchange.left = True
            exchange.answer = answer = self._ask_and_look(entry, args, kwargs, None)[:2]
        return answer

    def sharing(
        self, entry: str, *args: Any, on: RemoteObject | None = None
    ) -> tuple[Any, Sharing]:
        """The answer, and whose memory it, or the object whose method is called, uses."""
        self.make_later_calls()
        with self._recording(entry, args, {}, on) as exchange:
            exchange.looked = True
            exchange.answer, _, shared = self._ask_and_look(entry, args, {}, on)
        return exchange.answer, shared

    def _ask(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> Any:
        return _Call(self, entry, args, kwargs, on).answer()

    def _ask_and_look(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> tuple[Any, tuple[Any, ...], Sharing]:
        return _Call(self, entry, args, kwargs, on, observe=True).answer_and_more()

    @contextmanager
    def _recording(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> Iterator[Exchange]:
        exchange = Exchange(entry, args, kwargs, on)
        self.transcript.exchanges.append(exchange)
        try:
            yield exchange
        except SubmissionRaised as raised:
            exchange.raised, exchange.message = raised.kind, raised.message
            exchange.where = raised.where
            raise
        except SubmissionDied as death:
            exchange.died = str(death)
            raise

    def processor_wait(self) -> ProcessorWait:
        """Counts from now on how long a call waits because other programs have the processors."""
        return ProcessorWait(self.session.running.processes)

    def fresh(self) -> "Submission":
        """The same submission in another process, which ends when the check does."""
        other = Submission(self._folder_to_copy(), self.config, full=self.full)
        other.forgeries, other.transcript = self.forgeries, self.transcript
        other.processor_share = self.processor_share
        other._ahead = self._fresh_ahead
        self._fresh.append(other)
        return other

    def clean(self) -> "Submission":
        """The same submission with nothing left of earlier calls, until the check ends: in another
        process. For what differs between processes, such as memory or hashes, see `fresh`."""
        return self.fresh()

    def _folder_to_copy(self) -> Path:
        """The submission's files, for another process."""
        return self.folder

    @contextmanager
    def fresh_ahead(self, count: int) -> Iterator[SessionsAhead]:
        """Starts the sandboxes of the next `count` calls of `fresh` now."""
        self._fresh_ahead = SessionsAhead(self.folder, self.config, count)
        try:
            yield self._fresh_ahead
        finally:
            self._fresh_ahead.close()
            self._fresh_ahead = None

    def settle(self) -> None:
        """After a check: ends the processes that it asked for, and forgets calls that wait."""
        self._later.clear()
        while self._fresh:
            self._fresh.pop().close()

    def close(self) -> None:
        self.settle()
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lost(asks: Sequence[Ask]) -> list[Callable[[], Any]]:
    """Answers of a process that died: which of them it had given is not known."""
    return [lambda: None] * (len(asks) - 1)


class _Exchange:
    """One request with its callbacks: encodes what goes in, decodes what comes out."""

    header: Header

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.session = submission.session
        self.stubs: list[Stub] = []
        self._encoder = wire.Encoder(self._lend, keep_strides=True)

    def encode(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> Header:
        return {
            "entry": entry,
            "on": self._number(on) if on is not None else None,
            "args": self._encoder.encode(args),
            "kwargs": self._encoder.encode(kwargs),
        }

    def ask(self) -> tuple[Header, np.ndarray]:
        seconds = self.submission.config.call_seconds
        started = time.monotonic()
        try:
            return self.session.ask(
                self.header,
                self._encoder.buffers,
                seconds,
                self._call_back,
                self.submission.processor_share,
            )
        except SubmissionDied as death:
            self.submission.deaths += 1
            # A hang counts as the whole limit, however early it was known.
            hung = isinstance(death, SubmissionHung)
            self.submission.lost_seconds += seconds if hung else time.monotonic() - started
            self.submission._note(death)
            raise

    def _call_back(self, header: Header, body: np.ndarray) -> tuple[Header, list[Any]]:
        stub, method = header.get("stub"), header.get("method")
        if type(stub) is not int or not 0 <= stub < len(self.stubs) or type(method) is not str:
            raise SubmissionDied("called back a function that was not lent")
        args = self.decode(body, header.get("args"))
        kwargs = self.decode(body, header.get("kwargs"))
        try:
            value = self.stubs[stub].run(method, tuple(args), dict(kwargs))
        except (Violation, ArenaError):
            raise
        except Exception as error:  # what the stub refuses travels back to the caller
            return {"op": "refuse", "kind": type(error).__name__, "message": str(error)}, []
        encoder = wire.Encoder(self._lend, keep_strides=True)
        return {"op": "answer", "value": encoder.encode(value)}, encoder.buffers

    def decode(self, body: np.ndarray, node: Any) -> Any:
        try:
            return wire.Decoder(body, self._resolve).decode(node)
        except wire.WireError as error:
            raise SubmissionDied(f"its answer could not be read: {error}") from None

    def _lend(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, Stub):
            self.stubs.append(value)
            methods = [name for name in value.functions if name]
            number = len(self.stubs) - 1
            return {
                "t": "stub",
                "stub": number,
                "methods": methods,
                "callable": "" in value.functions,
            }
        if isinstance(value, RemoteObject):
            return {"t": "object", "object": self._number(value)}
        return None

    def _number(self, value: RemoteObject) -> int:
        if value._session is not self.session:
            raise SubmissionDied(NOT_HERE)
        return value._number

    def _resolve(self, node: dict[str, Any]) -> Any:
        if node.get("t") == "object" and type(node.get("object")) is int:
            kind = printable(str(node.get("type", "object"))[:200])
            return RemoteObject(self.submission, self.session, node["object"], kind)
        number = node.get("stub")
        if node.get("t") == "stub" and type(number) is int and 0 <= number < len(self.stubs):
            return self.stubs[number]
        raise wire.WireError("a value of unknown kind")


class _Call(_Exchange):
    """One call."""

    def __init__(
        self,
        submission: Submission,
        entry: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on: RemoteObject | None,
        *,
        observe: bool = False,
    ) -> None:
        super().__init__(submission)
        call = self.encode(entry, args, kwargs, on)
        self.header = {"op": "call", **call, "observe": observe}

    def answer(self) -> Any:
        reply, body = self.ask()
        return self.decode(body, reply.get("value"))

    def answer_and_more(self) -> tuple[Any, tuple[Any, ...], Sharing]:
        try:
            reply, body = self.ask()
        except SubmissionRaised as raised:
            if raised.reply is not None:
                raised.left = self._args(*raised.reply)
            raise
        args, shared = self._args(reply, body), reply.get("shared")
        if not isinstance(shared, list) or any(type(place) is not int for place in shared):
            raise SubmissionDied("the report on shared memory did not come back")
        return self.decode(body, reply.get("value")), args, Sharing.of(shared)

    def _args(self, reply: Header, body: np.ndarray) -> tuple[Any, ...]:
        args = self.decode(body, reply.get("args"))
        if not isinstance(args, tuple):
            raise SubmissionDied("the arguments did not come back")
        return args


class _Calls(_Exchange):
    """Several calls, which end at the first that raises."""

    def __init__(self, submission: Submission, asks: Sequence[Ask], *, refill: bool) -> None:
        super().__init__(submission)
        calls = [self.encode(entry, args, {}, on) for on, entry, args in asks]
        self.header = {"op": "calls", "calls": calls, "refill": refill}

    def answers(self) -> tuple[list[Callable[[], Any]], Violation | None]:
        trouble: SubmissionRaised | None = None
        try:
            reply, body = self.ask()
        except SubmissionRaised as raised:
            trouble = raised
        if trouble is not None:
            assert trouble.reply is not None
            reply, body = trouble.reply
        values, asked = reply.get("values"), len(self.header["calls"])
        count = len(values) if isinstance(values, list) else -1
        if not (0 <= count < asked if trouble else count == asked):
            raise SubmissionDied("the answers did not come back")
        assert isinstance(values, list)
        return [partial(self.decode, body, value) for value in values], trouble


class TimedCall:
    """A call that is encoded before the clock starts and decoded after it stops."""

    def __init__(
        self,
        submission: Submission,
        entry: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on: RemoteObject | None,
    ) -> None:
        submission.make_later_calls()
        self._exchange = _Call(submission, entry, args, kwargs, on)
        self._reply: tuple[Header, np.ndarray] | None = None

    def run(self) -> str:
        """Asks, and commits the answer: returns the digest of the bytes that arrived."""
        self._reply = self._exchange.ask()
        header, body = self._reply
        digest = hashlib.sha256(json.dumps(header.get("value")).encode())
        digest.update(body.data)
        return digest.hexdigest()

    def answer(self) -> Any:
        assert self._reply is not None
        header, body = self._reply
        return self._exchange.decode(body, header.get("value"))
