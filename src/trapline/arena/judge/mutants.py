"""Runs the gold solution and its mutants on single checks, in a process of their own.

A wrong answer is compared with what each known bug would have answered to the same calls. That
code is ours, so it needs no sandbox, only a process that may hang or die: `serve` answers requests
on its standard input, `MutantHost` is the other end.
"""

import atexit
import os
import pickle
import resource
import select
import shutil
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any, cast

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError
from trapline.arena.gpu.contract import entries
from trapline.arena.gpu.memory import MemoryFault
from trapline.arena.gpu.rig import Rig
from trapline.arena.judge.checks import run_check
from trapline.arena.judge.comparison import Opaque
from trapline.arena.judge.shared_runs import SharedRuns
from trapline.arena.judge.traps import Case, Trap
from trapline.arena.process.isolation.limits import ONE_THREAD
from trapline.arena.process.isolation.running import descendants, processor_seconds_of
from trapline.arena.process.local import LocalSubmission
from trapline.arena.process.proxy import RemoteObject, Stub, Submission
from trapline.arena.process.sandbox import scratch_folder
from trapline.arena.process.time_limit import TimeLimit
from trapline.arena.process.transcript import Exchange, Transcript

GOLD = "gold"
#: Stands between the names of bugs that one subject has together.
BOTH = " + "
#: A mutant that takes longer over one check is taken for one that hangs.
SECONDS = 60.0
_LENGTH = struct.Struct("!Q")
#: To start a process takes longer than most comparisons: so many wait for the next answer.
MOST_SPARE = 2
#: A request to forget all that is loaded; it has no answer.
_FORGET = ()


@dataclass(frozen=True)
class Run:
    """One check of one subject: whether it failed, why, and what was said."""

    failed: bool
    message: str
    transcript: Transcript
    #: The process ends after this answer: a GPU context in which a kernel failed is of no use.
    last: bool = False
    #: A call ended by its limit.
    died: bool = False


class _Packed(Transcript):
    """As it came from the other process: of most runs only the verdict is looked at."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @cached_property
    def exchanges(self) -> list[Exchange]:  # type: ignore[override]
        return cast(list[Exchange], pickle.loads(self._data))  # noqa: S301


def _packed(run: Run) -> tuple[bool, str, bytes, bool, bool]:
    said = pickle.dumps(run.transcript.exchanges)
    return run.failed, run.message, said, run.last, run.died


def _unpacked(data: bytes) -> Run | str:
    """A run, or why the other process could not make one."""
    # Both ends are this module: nothing that a submission made is ever read here.
    answer = pickle.loads(data)  # noqa: S301
    if isinstance(answer, str):
        return answer
    failed, message, said, last, died = answer
    return Run(failed, message, _Packed(said), last, died)


HUNG = Run(True, "no answer", Transcript())


class _Running:
    """A process that serves, and the folder of its subjects, which outlives a killed process."""

    def __init__(self) -> None:
        self.path = os.pathsep.join(filter(None, sys.path))
        self.folder = scratch_folder()
        command = f"import sys; from {__name__} import serve; serve(sys.argv[1])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, self.folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": self.path},
        )
        #: It has been asked something and has not answered yet.
        self.owes = False

    def is_usable(self) -> bool:
        """It lives, owes nothing, and imports from where this process does."""
        same_path = self.path == os.pathsep.join(filter(None, sys.path))
        return same_path and not self.owes and self.process.poll() is None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


class _Spare:
    """Processes that have answered everything and forgotten it."""

    def __init__(self) -> None:
        self._waiting: list[_Running] = []
        self._lock = threading.Lock()

    def take(self) -> _Running:
        """One that waits, or a new one."""
        with self._lock:
            while self._waiting:
                running = self._waiting.pop()
                if running.is_usable():
                    return running
                running.end()
        return _Running()

    def give(self, running: _Running) -> None:
        if running.is_usable():
            assert running.process.stdin is not None
            _write(running.process.stdin, _FORGET)
            with self._lock:
                if len(self._waiting) < MOST_SPARE:
                    self._waiting.append(running)
                    return
        running.end()

    def end_all(self) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.pop().end()

    def leave_to_the_parent(self) -> None:
        """After a fork: the processes, and the lock as it is, belong to the parent."""
        for running in self._waiting:
            running.folder._finalizer.detach()  # type: ignore[attr-defined]
        self._waiting, self._lock = [], threading.Lock()


_spare = _Spare()
_shared = SharedRuns()
atexit.register(_spare.end_all)
os.register_at_fork(after_in_child=_spare.leave_to_the_parent)


class MutantHost:
    """The process that runs our code; taken when first asked, and again after it died."""

    def __init__(
        self, challenge: Challenge, seed: int, full: bool = False, *, shared: bool = False
    ) -> None:
        """`shared`: other answers meet the same situations, so that runs are kept for them."""
        self.challenge, self.seed, self.full, self.shared = challenge, seed, full, shared
        #: How often a subject has answered a check.
        self.runs = 0
        self._running: _Running | None = None
        self._seen: dict[tuple[str, str], Run] = {}
        self._plantable: dict[str, bool] = {}
        self._planted: dict[str, dict[str, str] | None] = {}

    def start(self) -> "_Running":
        """Starts the process, so that it is ready when first asked."""
        if self._running is None:
            self._running = _spare.take()
        return self._running

    def run(self, subject: str, check: str) -> Run:
        """`subject` is the name of a form of a trap's bug, several with BOTH between, or GOLD."""
        key = subject, check
        if key not in self._seen:
            self._seen[key] = self._ask_once(subject, check)
        return self._seen[key]

    def _ask_once(self, subject: str, check: str) -> Run:
        """Asks, unless this was asked for another answer that met the same situations."""
        if not self.shared or not self._answers_alike(subject):
            return self._ask(subject, check)
        key = self.challenge.digest, _where(self.challenge), self.seed, self.full, subject, check
        made: list[Run] = []

        def make() -> bytes | None:
            run, data = self._ask_for_bytes(subject, check)
            made.append(run)
            # Where a call ended by its limit, another cell may have more luck.
            return None if run is HUNG or run.died else data

        kept = _shared.once(key, make)
        if made:
            return made[0]
        self.runs += 1  # as if asked, so that a diagnosis goes the same way
        assert kept is not None
        run = _unpacked(kept)
        assert isinstance(run, Run)
        return run

    def _answers_alike(self, subject: str) -> bool:
        """Whether its answers do not depend on what was asked before, on a GPU or private traps."""
        if self.challenge.track == "gpu" or self.challenge.trap_set is not None:
            return False
        forms = () if subject == GOLD else subject.split(BOTH)
        return not any(self.challenge.forms[form].keeps_state for form in forms)

    def can_plant(self, subject: str) -> bool:
        """Whether no two of these bugs edit the same text."""
        if subject not in self._plantable:
            others, _, last = subject.rpartition(BOTH)
            # The same few bugs are tried beside many others: their files are kept.
            if others not in self._planted:
                self._planted[others] = self._with_bugs(others)
            before = self._planted[others]
            self._plantable[subject] = before is not None and self._takes(before, last)
        return self._plantable[subject]

    def _with_bugs(self, subject: str) -> dict[str, str] | None:
        """The files with these bugs; None where two of them edit the same text."""
        try:
            return _files(self.challenge, subject or GOLD)
        except ArenaError:
            return None

    def _takes(self, files: dict[str, str], form: str) -> bool:
        try:
            self.challenge.forms[form].plant(files, form)
        except ArenaError:
            return False
        return True

    def run_again(self, subject: str | dict[str, str], check: str) -> Run:
        """Loaded anew, for code whose answers may vary or that keeps state."""
        return self._ask(subject, check, again=True)

    def ask_next(
        self, subject: str | dict[str, str], check: str, *, first: bool, alone: bool
    ) -> Run:
        """The next check of a subject that is asked in order, and loaded anew for the `first`;
        what it is asked otherwise does not change its state. `alone`: only the state counts."""
        return self._ask(subject, check, again=first, alone=alone, in_order=True)

    @property
    def process(self) -> object | None:
        """The process that runs our code at present."""
        return self._running

    def run_files(self, files: dict[str, str], check: str) -> Run:
        """Any files of ours, for example two mutants at once."""
        return self._ask(files, check)

    def _ask(
        self,
        subject: str | dict[str, str],
        check: str,
        *,
        again: bool = False,
        alone: bool = False,
        in_order: bool = False,
    ) -> Run:
        how = {"again": again, "alone": alone, "in_order": in_order}
        return self._ask_for_bytes(subject, check, **how)[0]

    def _ask_for_bytes(
        self,
        subject: str | dict[str, str],
        check: str,
        *,
        again: bool = False,
        alone: bool = False,
        in_order: bool = False,
    ) -> tuple[Run, bytes]:
        """The run, and the bytes it came in."""
        self.runs += 1
        running = self.start()
        process = running.process
        how = again, alone, in_order
        request = (_where(self.challenge), subject, check, self.seed, self.full, *how)
        assert process.stdin is not None
        assert process.stdout is not None
        running.owes = True
        _write(process.stdin, request)
        data = _read(process.stdout) if _answers_in_time(process) else None
        if data is None:
            self.close()
            return HUNG, b""
        running.owes = False
        run = _unpacked(data)
        if isinstance(run, str):
            raise ArenaError(run)
        if run.last:
            self.close()
        return run, data

    def close(self) -> None:
        """Leaves the process to the next host, unless it has a GPU context or private traps."""
        if self._running is None:
            return
        if self.challenge.track == "gpu" or self.challenge.trap_set is not None:
            self._running.end()
        else:
            _spare.give(self._running)
        self._running = None

    def __enter__(self) -> "MutantHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answers_in_time(process: "subprocess.Popen[bytes]") -> bool:
    limit = TimeLimit(
        SECONDS, 1.0, lambda: descendants(process.pid), lambda: processor_seconds_of(process.pid)
    )
    assert process.stdout is not None
    answers = select.poll()
    answers.register(process.stdout, select.POLLIN)
    while not limit.is_over():
        if answers.poll(1000 * limit.until_next_look()):
            return True
    return False


def _where(challenge: Challenge) -> tuple[Path, str, str, Path | None]:
    """What the other process makes the same challenge from."""
    private = challenge.trap_set.folder if challenge.trap_set else None
    return challenge.folder, challenge.package, challenge.profile_name, private


def _write(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    try:
        stream.write(_LENGTH.pack(len(data)) + data)
        stream.flush()
    except BrokenPipeError:
        return  # the reader sees the end of the stream


def _read(stream: IO[bytes]) -> bytes | None:
    """The next value as bytes, or None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def _opaque(value: Any) -> Any:
    """The same value, with a marker for each object that stays in this process."""
    if isinstance(value, RemoteObject | Stub):
        return Opaque()
    if isinstance(value, list | tuple):
        return type(value)(_opaque(item) for item in value)
    if isinstance(value, dict):
        return {key: _opaque(item) for key, item in value.items()}
    return value


def sendable(transcript: Transcript) -> Transcript:
    """The answers without the arguments, which the other end knows."""
    return Transcript([_sendable(exchange) for exchange in transcript.exchanges])


def _sendable(exchange: Exchange) -> Exchange:
    # Not `replace`, which takes ten times as long: most runs have a dozen exchanges.
    answer = _opaque(exchange.answer)
    return Exchange(**{**vars(exchange), "args": (), "kwargs": {}, "on": None, "answer": answer})


class _Server:
    """Keeps the subjects that it has loaded: the same few are asked about many checks."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        #: By its name or files, and whether it is asked in order.
        self.loaded: dict[tuple[str, bool], Submission] = {}
        #: How many were loaded so far.
        self.loads = 0
        #: Buffers of GPU subjects: some checks need gigabytes, which all subjects can share.
        self.rig: Rig | None = None

    @staticmethod
    @cache
    def challenge(folder: Path, package: str, profile: str, trap_set: Path | None) -> Challenge:
        return Challenge(folder, package, profile, trap_set)

    def serve(self) -> None:
        requests, answers = sys.stdin.buffer, sys.stdout.buffer
        sys.stdout = sys.stderr
        while (data := _read(requests)) is not None:
            request = pickle.loads(data)  # noqa: S301
            if request == _FORGET:
                self.forget()
                continue
            try:
                answer: Any = _packed(self.run(*request))
            except ArenaError as error:
                answer = str(error)
            _write(answers, answer)

    def forget(self) -> None:
        """As after the start: a subject may keep state between calls."""
        self.loaded.clear()
        for folder in Path(self.folder).iterdir():
            shutil.rmtree(folder)

    def run(
        self,
        where: tuple[Path, str, str, Path | None],
        subject: str | dict[str, str],
        check_id: str,
        seed: int,
        full: bool,
        again: bool,
        alone: bool,
        in_order: bool,
    ) -> Run:
        """`alone`: without further processes of the subject, for the state that it leaves."""
        challenge = self.challenge(*where)
        if challenge.track == "cpu":
            _limit_memory(challenge)
        checks: list[Case | Trap] = [*challenge.cases, *challenge.traps]
        check = next(check for check in checks if check.id == check_id)
        name = subject if isinstance(subject, str) else str(sorted(subject.items()))
        key = name, in_order
        if again or key not in self.loaded:
            try:
                self.loaded[key] = self.load(challenge, subject, full)
            except Exception as error:  # a mutant that cannot be imported fails everything
                return Run(True, f"cannot be imported: {error}", Transcript())
        submission = self.loaded[key]
        if isinstance(submission, LocalSubmission):
            submission.alone = alone
        result = run_check(check, submission, seed)
        died = any(exchange.died for exchange in submission.transcript.exchanges)
        said = Transcript() if alone else sendable(submission.transcript)
        return Run(result.state == "fail", result.message, said, self.is_broken(), died)

    def is_broken(self) -> bool:
        """A kernel has failed: the GPU context of this process answers nothing more."""
        try:
            if self.rig is not None:
                self.rig.judge.ask("drain")
        except MemoryFault:
            return True
        return False

    def load(self, challenge: Challenge, subject: str | dict[str, str], full: bool) -> Submission:
        self.loads += 1
        folder, files = Path(self.folder, str(self.loads)), _files(challenge, subject)
        config = challenge.sandbox_config("process", challenge.plan.limits.mutant_seconds)
        if challenge.track == "gpu":
            from trapline.arena.gpu.local import LocalGpuSubmission  # imports torch

            folder.mkdir()
            for path, source in files.items():
                (folder / path).write_text(source, encoding="utf-8")
            contract = entries(challenge.module("cases"))
            submission = LocalGpuSubmission(folder, config, contract, self.rig, full=full)
            self.rig = submission.rig
            return submission
        return LocalSubmission(folder, config, full=full, files=files)


def _files(challenge: Challenge, subject: str | dict[str, str]) -> dict[str, str]:
    gold = challenge.solution_files()
    if isinstance(subject, dict):
        return subject
    if subject == GOLD:
        return gold
    for form in subject.split(BOTH):
        gold = challenge.forms[form].plant(gold, form)
    return gold


def _limit_memory(challenge: Challenge) -> None:
    """As in the sandbox: what does not fit raises MemoryError.

    Set before every run, since threads of ended processes leave address space behind.
    """
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + (challenge.plan.limits.memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def serve(folder: str) -> None:
    _Server(folder).serve()
