"""Who may use a GPU: any number of checks side by side, or one timing alone.

Two locked files for each GPU serve all graders of this user. A timing holds the first one, the
gate, while it waits for the second one, the room. No further check can enter, so the timing comes
next, however many checks are waiting. The system releases the locks of a grader that is killed.
"""

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trapline.arena.errors import ArenaError

_COUNTER_BYTES = 8


class _Held(threading.local):
    """What this thread holds. It may enter again what it is in: else it would wait for itself."""

    def __init__(self) -> None:
        self.turns: dict[str, Shared] = {}
        self.alone: set[str] = set()
        self.waited = 0.0


_held = _Held()


class Shared:
    """One thread's use of a GPU beside others; ends when everyone who joined has left."""

    def __init__(self, gpu: str) -> None:
        self._gpu, self._of = gpu, _held.turns
        self._room = _open(gpu, "room")
        self._users = 1
        with _locked(gpu, "gate") as gate:
            self._others = not _is_free(self._room)
            _wait(self._room, fcntl.LOCK_SH)
            self._number = _count(gate) + 1
            os.pwrite(gate, self._number.to_bytes(_COUNTER_BYTES, "big"), 0)
        self._of[gpu] = self

    def join(self) -> "Shared":
        self._users += 1
        return self

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            del self._of[self._gpu]
            os.close(self._room)

    def had_company(self) -> bool:
        """Whether another thread or process used the GPU at any time since this turn began."""
        fd = _open(self._gpu, "gate")
        try:
            return self._others or _count(fd) != self._number
        finally:
            os.close(fd)


def waited() -> float:
    """Seconds that this thread has waited for its turns."""
    return _held.waited


def share(gpu: str) -> Shared | None:
    """Waits until nothing is timed; the caller leaves. None for a thread that has the GPU alone,
    and for what stands in for a GPU."""
    if not gpu or gpu in _held.alone:
        return None
    turn = _held.turns.get(gpu)
    return turn.join() if turn is not None else Shared(gpu)


@contextmanager
def beside(gpu: str) -> Iterator[None]:
    """While this is entered, nothing is timed."""
    turn = share(gpu)
    try:
        yield
    finally:
        if turn is not None:
            turn.leave()


@contextmanager
def alone(gpu: str) -> Iterator[None]:
    """Uses the GPU alone while this is entered."""
    if not gpu or gpu in _held.alone:
        yield
        return
    if gpu in _held.turns:
        raise ArenaError("a timing began while an answer's process of the same cell was running")
    with _locked(gpu, "gate"), _locked(gpu, "room"):
        _held.alone.add(gpu)
        try:
            yield
        finally:
            _held.alone.remove(gpu)


def _open(gpu: str, name: str) -> int:
    path = Path(tempfile.gettempdir(), f"trapline-{os.getuid()}.gpu-{gpu}.{name}")
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


@contextmanager
def _locked(gpu: str, name: str) -> Iterator[int]:
    fd = _open(gpu, name)
    try:
        _wait(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _wait(fd: int, kind: int) -> None:
    begun = time.perf_counter()
    fcntl.flock(fd, kind)
    _held.waited += time.perf_counter() - begun


def _is_free(room: int) -> bool:
    try:
        fcntl.flock(room, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _count(gate: int) -> int:
    """How many shared turns there have been."""
    return int.from_bytes(os.pread(gate, _COUNTER_BYTES, 0), "big")
