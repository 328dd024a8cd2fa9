"""A program that runs: what it prints, what it uses, and its end."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path
from typing import IO

from trapline.arena.errors import ArenaError
from trapline.arena.process.isolation.cgroups import Group
from trapline.arena.process.isolation.stage import SandboxStage
from trapline.arena.process.time_limit import ProcessorWait

_KEPT_OUTPUT = 16 << 10
_GONE_SECONDS = 20.0
_STILL_SECONDS = 2.0
_CALM_LOOKS = 4
_RESET_PEAK = "5"


class RunningSandbox:
    def __init__(self, process: subprocess.Popen[bytes], stage: SandboxStage, group: Group) -> None:
        self.pid = process.pid
        self._process = process
        self._group = group
        self._reason = ""
        assert process.stdout is not None
        self._tail = _Tail(process.stdout)
        self._finalizer = weakref.finalize(self, _end, process, stage, group)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends everything inside and returns when it is gone. May be called again."""
        if not self._reason:
            self._reason = "we ended it" if self.alive() else self.reason()
        self._finalizer()
        self._tail.finish()

    def pause(self) -> None:
        """Everything inside stands still when this returns; what will not is ended."""
        if self._group.freeze() or self._stop_all():
            return
        self.kill()

    def _stop_all(self) -> bool:
        """Without a freezer: stop all processes seen, until no new one has appeared for a while."""
        stopped: set[int] = set()
        deadline, calm, wait = time.monotonic() + _STILL_SECONDS, 0, ProcessorWait()
        while calm < _CALM_LOOKS:
            unseen = {self.pid, *_others(self.pid, self._group)} - stopped
            _signal(unseen, signal.SIGSTOP)
            stopped |= unseen
            calm = 0 if unseen else calm + 1
            if time.monotonic() > deadline + wait.seconds():
                return False
        return True

    def resume(self) -> None:
        if not self._group.thaw():
            _signal({self.pid, *_others(self.pid, self._group)}, signal.SIGCONT)

    def keep_to(self, processors: set[int]) -> None:
        """All threads inside, and those that they start, run on these processors only."""
        for pid in descendants(self.pid):
            for task in _tasks(pid):
                with contextlib.suppress(OSError):  # it has ended
                    os.sched_setaffinity(task, processors)

    def output(self) -> str:
        """The last of what it printed; what it prints never makes it wait."""
        return self._tail.text()

    def peak_bytes(self) -> int:
        """The most memory in use, by the kernel's count: the control group's, which remembers
        processes that have ended, or else the sum over the processes there are."""
        counted = self._group.peak_bytes()
        if counted is not None:
            return counted
        peaks = (_status(pid, "VmHWM").split() or ["0"] for pid in descendants(self.pid))
        return sum(1024 * int(peak[0]) for peak in peaks)

    def reset_peak(self) -> None:
        """The peak starts again from what is in use now."""
        self._group.reset_peak()
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK, encoding="utf-8")

    def processes(self) -> list[int]:
        return descendants(self.pid)

    def processor_seconds(self) -> float:
        """Processor time so far: by the control group, which remembers processes that have ended,
        or else the sum over the processes there are."""
        counted = self._group.processor_seconds()
        if counted is not None:
            return counted
        return sum(processor_seconds_of(pid) for pid in descendants(self.pid))

    def reason(self) -> str:
        code = self._process.poll()
        if self._reason or code is None:
            return self._reason or "it is still running"
        if self._group.ran_out_of_memory():
            return "ended by the kernel: it used more memory than allowed"
        number = -code if code < 0 else code - 128
        if number in signal.valid_signals():
            return f"ended by {signal.Signals(number).name}{_MEANING.get(number, '')}"
        return f"exited with code {code}"


_MEANING: dict[int, str] = {
    signal.SIGXCPU: ": its processor time was used up",
    signal.SIGXFSZ: ": it wrote a file larger than allowed",
    signal.SIGSYS: ": it used a forbidden system call",
}


class _Tail:
    """Drains a pipe and keeps the end of what came."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 1 << 16):
                with self._lock:
                    self._kept += chunk
                    del self._kept[:-_KEPT_OUTPUT]

    def finish(self) -> None:
        self._thread.join(timeout=_GONE_SECONDS)

    def text(self) -> str:
        with self._lock:
            return self._kept.decode(errors="replace")


def _end(process: subprocess.Popen[bytes], stage: SandboxStage, group: Group) -> None:
    """With the first process of a namespace the kernel ends all the others at once."""
    group.thaw()
    group.forbid_forks()
    # Who was paused does not notice that its children have ended.
    _signal({process.pid} if process.poll() is None else set(), signal.SIGCONT)
    children = _children(process.pid) or ()
    first = {pid for pid in children if _status(pid, "NSpid").split()[1:] == ["1"]}
    if first:
        _signal(first, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GONE_SECONDS)
    else:
        _end_orphans(process.pid, group)
    process.kill()
    process.wait()
    _end_orphans(process.pid, group)
    group.remove()
    stage.remove()


def _end_orphans(started: int, group: Group) -> None:
    """They hang on the process we started or are in its group; it must not let go of them first."""
    deadline = time.monotonic() + _GONE_SECONDS
    while inside := _others(started, group):
        _signal(inside, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ArenaError(f"processes {inside} of a sandbox would not end")
        time.sleep(0.0005)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _others(started: int, group: Group) -> set[int]:
    return {*descendants(started), *group.members()} - {started}


def descendants(root: int) -> list[int]:
    """`root` and all that descend from it, as far as they have not ended."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        children = _children(pid)
        if children is not None:
            found.append(pid)
            waiting += children
    return found


def _tasks(pid: int) -> list[int]:
    """The threads of a process; none when it is gone."""
    with contextlib.suppress(OSError):
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    return []


def _children(pid: int) -> list[int] | None:
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="utf-8")
            children += map(int, text.split())
    except OSError:
        return None
    return children


def processor_seconds_of(pid: int) -> float:
    """Of all threads of a process, ended ones included; 0 when it is gone."""
    try:
        # The kernel's number of the clock of another process: what clock_getcpuclockid(3) gives.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def _status(pid: int, field: str) -> str:
    """One field of what the kernel says of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return line.partition(":")[2]
    return ""
