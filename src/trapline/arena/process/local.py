"""Our own code, run in this process through the same doors as a submission.

For the gold solution and its mutants only: there is no sandbox here. What goes in and out is copied
by the same encoder as over the channel, so that a check cannot tell the two apart.
"""

import importlib
import math
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from trapline.arena.errors import SubmissionDied, SubmissionRaised, Violation
from trapline.arena.process import wire
from trapline.arena.process.proxy import (
    NOT_HERE,
    Ask,
    RemoteObject,
    Sharing,
    Stub,
    Submission,
    lost,
)
from trapline.arena.process.session import SandboxConfig
from trapline.arena.process.time_limit import MOST_ADDED, ProcessorWait

#: Less waiting than this share of a limit is not granted.
GRANTED_SHARE = 0.01
#: Waiting this long before a call is taken for waiting in it.
KEPT_SECONDS = 0.02


class TooLongError(BaseException):
    """The call ran past its time; not an Exception, so that the code under test lets it pass."""


class LocalSubmission(Submission):
    """Files of ours, imported here. One at a time in a process: all are called `solution`."""

    is_ours = True

    def __init__(
        self,
        folder: Path,
        config: SandboxConfig,
        *,
        full: bool = False,
        files: dict[str, str] | None = None,
    ) -> None:
        """`files`, path → text, are imported instead of the folder's; it then need not exist."""
        super().__init__(folder, config, full=full)
        self._files = files
        self._module = load(folder, config.entry, files)
        self._objects: dict[int, Any] = {}
        self._memory = wire.AnsweredMemory()
        #: A check that asks for another process of it ends there.
        self.alone = False

    def close(self) -> None:
        self.settle()
        self._objects.clear()

    def processor_wait(self) -> ProcessorWait:
        return ProcessorWait()

    def _folder_to_copy(self) -> Path:
        if self._files is not None and not self.folder.exists():
            self.folder.mkdir()
            for path, text in self._files.items():
                (self.folder / path).write_text(text, encoding="utf-8")
        return self.folder

    def fresh(self) -> Submission:
        if self.alone:
            raise Violation("no further process is started")
        return super().fresh()

    def clean(self) -> "LocalSubmission":
        """Loaded anew in this process: whatever our code keeps, it keeps in its modules."""
        other = LocalSubmission(self.folder, self.config, full=self.full, files=self._files)
        other.forgeries, other.transcript = self.forgeries, self.transcript
        self._fresh.append(other)
        return other

    def _ask(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> Any:
        return self._copy_out(self._run(entry, self._copy_in(args), kwargs, on))

    def _ask_all(
        self, asks: Sequence[Ask], *, refill: bool = False
    ) -> tuple[list[Callable[[], Any]], Violation | None]:
        answers: list[Callable[[], Any]] = []
        held: tuple[Any, ...] | None = None
        for on, entry, args in asks:
            try:
                if refill:
                    held = wire.filled_anew(held, self._copy_in(args))
                    answer = self._copy_out(self._run(entry, held, {}, on))
                else:
                    answer = self._ask(entry, args, {}, on)
            except SubmissionRaised as raised:
                return answers, raised
            except SubmissionDied as death:
                return lost(asks), death
            answers.append(lambda answer=answer: answer)  # type: ignore[misc]
        return answers, None

    def _ask_and_look(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> tuple[Any, tuple[Any, ...], Sharing]:
        given = self._copy_in(args)
        owner = None if on is None else self._object(on)
        try:
            value = self._run(entry, given, kwargs, on)
        except SubmissionRaised as raised:
            raised.left = self._copy_out(given)
            raise
        shared = Sharing.of(self._memory.shared(given, value, owner))
        return self._copy_out(value), self._copy_out(given), shared

    def _run(
        self, entry: str, given: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> Any:
        owner = self._module if on is None else self._object(on)
        named = self._copy_in(kwargs) if kwargs else {}
        with limited(self.config.call_seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return getattr(owner, entry)(*given, **named)
            except TooLongError:
                raise SubmissionDied(f"no answer within {self.config.call_seconds:g} s") from None
            except BaseException as error:  # ours, but a bug was put into it
                bases = tuple(kind.__name__ for kind in type(error).__mro__)
                raise SubmissionRaised(bases[0], bases, str(error)[:2000]) from None

    def _object(self, value: RemoteObject) -> Any:
        if value._submission is not self:
            raise SubmissionDied(NOT_HERE)
        return self._objects[value._number]

    def _copy_in(self, value: Any) -> Any:
        held: list[Any] = []
        return _copied(value, lambda v: _hold(held, v), lambda node: self._arrive(held, node), True)

    def _arrive(self, held: list[Any], node: dict[str, Any]) -> Any:
        value = held[node["held"]]
        if isinstance(value, RemoteObject):
            return self._object(value)
        if isinstance(value, Stub):
            return _Lent(self, value)
        raise wire.WireError(f"a {type(value).__name__} is not plain data")

    def _copy_out(self, value: Any) -> Any:
        held: list[Any] = []

        def leave(node: dict[str, Any]) -> Any:
            kept = held[node["held"]]
            if isinstance(kept, _Lent):
                return kept._stub
            self._objects[id(kept)] = kept
            return RemoteObject(self, None, id(kept), type(kept).__name__)  # type: ignore[arg-type]

        try:
            return _copied(value, lambda v: _hold(held, v), leave, False)
        except wire.WireError as error:
            raise SubmissionDied(f"its answer could not be read: {error}") from None


class _Lent:
    """A stub as the code under test sees it."""

    def __init__(self, owner: LocalSubmission, stub: Stub) -> None:
        self._owner, self._stub = owner, stub
        for name in stub.functions:
            if name:
                setattr(self, name, self._method(name))

    def _method(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            owner = self._owner
            answer = self._stub.run(name, owner._copy_out(args), owner._copy_out(kwargs))
            return owner._copy_in(answer)

        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "" not in self._stub.functions:
            raise TypeError("this object cannot be called")
        return self._method("")(*args, **kwargs)


def _hold(held: list[Any], value: Any) -> dict[str, Any]:
    held.append(value)
    return {"t": "held", "held": len(held) - 1}


def _copied(
    value: Any,
    special: Callable[[Any], dict[str, Any]],
    resolve: Callable[[dict[str, Any]], Any],
    keep_strides: bool,
) -> Any:
    try:
        return _plain_copy(value)
    except _NotPlainError:
        pass
    encoder = wire.Encoder(special, keep_strides=keep_strides)
    node = encoder.encode(value)
    parts = [np.frombuffer(memoryview(b).cast("B"), np.uint8) for b in encoder.buffers if len(b)]
    body = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    return wire.Decoder(body, resolve).decode(node)


class _NotPlainError(Exception):
    """A value that only the encoder knows how to copy."""


#: Immutable, and the same at both ends of the channel.
_SCALARS = frozenset({type(None), bool, int, float, str})
#: The encoder counts the items of longer sequences and of deeper nesting.
_MOST_ITEMS, _MOST_DEPTH = 1000, 4


def _plain_copy(value: Any, depth: int = 0) -> Any:
    """What the encoder and the decoder make of it, for ordinary values several times as fast."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is np.ndarray:
        dtype = value.dtype
        is_sent = dtype.kind in "biufc" and dtype.itemsize <= 16
        if is_sent and dtype.isnative and value.flags.c_contiguous:
            return value.copy()
    elif kind in (tuple, list) and depth < _MOST_DEPTH and len(value) <= _MOST_ITEMS:
        return kind([_plain_copy(item, depth + 1) for item in value])
    elif kind is dict and depth < _MOST_DEPTH and len(value) <= _MOST_ITEMS:
        return {_plain_key(key): _plain_copy(item, depth + 1) for key, item in value.items()}
    raise _NotPlainError


def _plain_key(key: Any) -> Any:
    if type(key) is str:
        return key
    raise _NotPlainError


#: The beginning of a line that may begin a statement.
_BEGINS = re.compile(r"^(?=[^\s#)\]}])(?!else|elif|except|finally)", re.MULTILINE)


class _Loader(InspectLoader):
    """Compiles each statement of a module once: a mutant shares all but one with the others, and
    takes longer to compile than to answer."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name

    def get_source(self, _: str) -> str:
        return self._text

    def exec_module(self, module: ModuleType) -> None:
        for code in _compiled_parts(self._text, self._name):
            exec(code, module.__dict__)  # noqa: S102


@lru_cache(maxsize=512)
def _compiled_parts(text: str, name: str) -> list[CodeType]:
    """The code of a module, statement by statement; as one where that cannot be told."""
    parts: list[CodeType] = []
    begun = ""
    for lines in [text] if "__future__" in text else _BEGINS.split(text):
        begun += lines
        code = _compiled(begun, name)
        if code is not None:
            parts.append(code)
            begun = ""
    return [compile(text, name, "exec", dont_inherit=True)] if begun else parts


@lru_cache(maxsize=4096)
def _compiled(text: str, name: str) -> CodeType | None:
    """The code of some lines; None for the beginning of a longer statement."""
    try:
        return compile(text, name, "exec", dont_inherit=True)
    except SyntaxError:
        return None


class _Finder(MetaPathFinder):
    """Finds the modules of a folder."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        self._folder, self._files = folder, files

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        file = f"{name}.py"
        if file not in self._files:
            return None
        loader = _Loader(self._files[file], file)
        return spec_from_file_location(name, str(self._folder / file), loader=loader)


def load(
    folder: Path,
    entry: str = "solution",
    files: Mapping[str, str] | None = None,
    *,
    compile_once: bool = True,
) -> Any:
    """Imports a folder's module, or one of these texts as if they were in it. Code that was
    compiled once knows its file's name but not its folder, so that nothing can read its text
    again, as Triton does."""
    if files is None:
        files = {path.name: decode_source(path.read_bytes()) for path in folder.glob("*.py")}
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)
    finder = _Finder(folder, files)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    if compile_once:
        sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(entry)
    finally:
        sys.path.remove(str(folder))
        if compile_once:
            sys.meta_path.remove(finder)
        importlib.invalidate_caches()


class limited:  # noqa: N801
    """Interrupts Python code after this time, in which waiting for a processor does not count."""

    #: The limit of the call that runs.
    _current: "limited | None" = None
    _is_installed = False
    #: Counts the waiting since this time on the clock, which may be a little before the call: to
    #: begin anew takes longer than many a call.
    _wait, _begun = ProcessorWait(), -math.inf

    def __init__(self, seconds: float) -> None:
        self._seconds, self._granted = seconds, 0.0

    def __enter__(self) -> None:
        if not limited._is_installed:  # once: that takes longer than many a call
            signal.signal(signal.SIGALRM, limited._interrupt)
            limited._is_installed = True
        limited._current = self
        if (now := time.monotonic()) - limited._begun > KEPT_SECONDS:
            limited._wait, limited._begun = ProcessorWait(), now
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        limited._current = None

    @staticmethod
    def _interrupt(*_: object) -> None:
        if limited._current is not None:
            limited._current._grant_or_raise()

    def _grant_or_raise(self) -> None:
        waited = min(self._wait.seconds(), MOST_ADDED * self._seconds)
        if waited - self._granted < GRANTED_SHARE * self._seconds:
            raise TooLongError
        signal.setitimer(signal.ITIMER_REAL, waited - self._granted)
        self._granted = waited
