"""Time limits that other programs on the machine cannot use up.

A limit runs by the clock. The time in which the judged code is ready to run and every processor is
taken by something else does not count.
"""

import os
import time
from collections.abc import Callable, Iterable

#: So many times a limit is added at most: a machine slower than that cannot grade.
MOST_ADDED = 9.0
#: How soon a call that takes long is looked at first, and how often then.
FIRST_LOOK_SECONDS, LOOK_SECONDS = 0.5, 0.2
#: In which a message that has begun to come, or that answers a callback, must be through.
TRANSFER_SECONDS = 1.0


class ProcessorWait:
    """How long these processes waited for a processor since this was made.

    Threads of theirs wait side by side, so the one that waited longest counts. This thread, which
    does not run while they work for it, is added.
    """

    def __init__(self, pids: Callable[[], Iterable[int]] = tuple) -> None:
        self._pids = pids
        self._before = self._delays()
        self._own_before = _delay("/proc/thread-self/schedstat")
        self._longest = 0.0

    def seconds(self) -> float:
        """Of processes that have ended, as far as they were looked at before."""
        waited = (delay - self._before.get(task, 0.0) for task, delay in self._delays().items())
        self._longest = max(self._longest, *waited, 0.0)
        return self._longest + _delay("/proc/thread-self/schedstat") - self._own_before

    def _delays(self) -> dict[str, float]:
        tasks = (task for pid in self._pids() for task in _tasks(f"/proc/{pid}/task"))
        return {task: _delay(f"{task}/schedstat") for task in tasks}


def _tasks(folder: str) -> list[str]:
    try:
        return [f"{folder}/{task}" for task in os.listdir(folder)]
    except OSError:  # the process has ended
        return []


def _delay(path: str) -> float:
    """The kernel's count of a thread's waiting; 0 where it is gone or not counted."""
    try:
        file = os.open(path, os.O_RDONLY)  # a mutant is asked thousands of times
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 256).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
    finally:
        os.close(file)


class TimeLimit:
    """The time of one call in other processes, looked at from here.

    With a `share` below 1 the call ends when it has used that share of its time as processor time:
    an endless loop is then known early, and on a busy machine as on an idle one.
    """

    def __init__(
        self,
        seconds: float,
        share: float,
        pids: Callable[[], Iterable[int]],
        processor_seconds: Callable[[], float],
    ) -> None:
        self.seconds = seconds
        self._most = seconds * share if share < 1.0 else None
        self._pids, self._processor_seconds = pids, processor_seconds
        self._start = time.monotonic()
        first = min(FIRST_LOOK_SECONDS, seconds / 4) if self._most is None else self._most
        self._next_look = self._start + first
        self._wait: ProcessorWait | None = None
        self._used_before = 0.0
        #: Seconds of waiting that were seen so far.
        self.waited = 0.0

    @property
    def deadline(self) -> float:
        return self._start + self.seconds + min(self.waited, MOST_ADDED * self.seconds)

    def transfer_deadline(self) -> float:
        """For one message; the limit itself is looked at between messages."""
        return max(self.deadline, time.monotonic() + TRANSFER_SECONDS)

    def until_next_look(self) -> float:
        return max(0.0, self._next_look - time.monotonic())

    def is_over(self) -> bool:
        """Looks at the processes now and then if the call takes long; short calls cost nothing."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + min(LOOK_SECONDS, self.seconds / 4)
        if self._wait is None:
            self._wait, self._used_before = ProcessorWait(self._pids), self._processor_seconds()
        used = self._processor_seconds() - self._used_before
        if self._most is not None and used >= self._most:
            return True
        if used < self.seconds:  # beyond that it waits for threads of its own
            self.waited = self._wait.seconds()
        return now >= self.deadline
