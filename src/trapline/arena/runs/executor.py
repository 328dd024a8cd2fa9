"""Where cells are graded: on this machine, or in slots that another executor offers."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from trapline.arena.challenge import Challenge
from trapline.arena.errors import InterruptedRunError, MissingError, UsageError
from trapline.arena.judge.grade import OnStep, grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.sandbox import probe, why_not
from trapline.arena.record import LEVELS, Bundle, Level

#: Cells beyond the number of cores: one that waits for its turn to be timed, or for a process to
#: start or end, leaves a core free.
SPARE_CELLS = 1
Work = TypeVar("Work")
Result = TypeVar("Result")


class Slot(Protocol):
    def grade(self, request: GradeRequest, challenge: Challenge, on_step: OnStep) -> Bundle: ...


class Executor(Protocol):
    """Offers slots to any number of threads."""

    #: The largest number of cells graded at once.
    width: int

    def level(self, required: Level | None = None, forced: Level | None = None) -> Level:
        """The isolation level to grade at; see `choose_level`."""
        ...

    def slot(self, *, alone: bool) -> AbstractContextManager[Slot]:
        """Waits for a free slot; `alone`: on a machine that grades nothing else meanwhile."""
        ...

    def close(self) -> None:
        """Abandons what is still running."""
        ...


class LocalExecutor:
    """This machine. `measure.quiet` keeps two timings from overlapping."""

    def __init__(self, workers: int | None = None) -> None:
        self.width = workers or cores() + SPARE_CELLS

    def level(self, required: Level | None = None, forced: Level | None = None) -> Level:
        return choose_level(required, forced)

    def slot(self, *, alone: bool) -> AbstractContextManager["LocalExecutor"]:  # noqa: ARG002
        return nullcontext(self)

    def grade(self, request: GradeRequest, challenge: Challenge, on_step: OnStep) -> Bundle:
        return grade(request, challenge, on_step)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Calls a function of a module where cells are graded."""
        return function(*args)

    def close(self) -> None:
        """Sandboxes end with the threads that opened them."""


def choose_level(required: Level | None = None, forced: Level | None = None) -> Level:
    """The `forced` level, or else the strongest that this machine offers.

    A level weaker than `required`, and a forced one that the machine lacks, are refused.
    """
    refuse_contradiction(required, forced)
    if forced is not None:
        if reason := why_not(forced):
            raise MissingError(f"this machine does not offer isolation {forced!r}: {reason}")
        return forced
    best = probe()[0]
    if required is not None and is_weaker(best, required):
        raise MissingError(f"this machine offers isolation {best!r}, {required!r} was required")
    return best


def is_weaker(level: Level, than: Level) -> bool:
    return LEVELS.index(level) < LEVELS.index(than)


def refuse_contradiction(required: Level | None, forced: Level | None) -> None:
    if required is not None and forced is not None and is_weaker(forced, required):
        raise UsageError(
            f"--isolation {forced} is weaker than --require-isolation {required}: give one of them"
        )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_all(
    work: Callable[[Work], Result], jobs: Iterable[Work], workers: int | None = None
) -> Iterator[tuple[Work, Result]]:
    """Yields each job with its result as it ends. Threads suffice: other processes do the work."""
    pool = ThreadPoolExecutor(workers or cores())
    pending: dict[Future[Result], Work] = {}
    try:
        pending.update((pool.submit(work, job), job) for job in jobs)
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), future.result()
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise InterruptedRunError from None
    finally:
        pool.shutdown(wait=not pending, cancel_futures=True)
