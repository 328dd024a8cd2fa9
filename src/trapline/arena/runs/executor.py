"""Where cells are graded: on this machine, side by side, or wherever a seat is offered."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from trapline.arena.challenge import Challenge
from trapline.arena.errors import InterruptedRunError, MissingError
from trapline.arena.judge.grade import OnStep, grade_intake
from trapline.arena.process.sandbox import probe
from trapline.arena.record import LEVELS, Bundle, Level
from trapline.arena.runs.grade_request import Shipment

Work = TypeVar("Work")
Result = TypeVar("Result")


class Seat(Protocol):
    """Room for one cell."""

    def grade(self, shipment: Shipment, challenge: Challenge, on_step: OnStep) -> Bundle: ...


class Executor(Protocol):
    """Offers seats to as many threads as ask."""

    #: How many cells may be at work at once.
    width: int
    #: Whether the cells are graded on this very machine.
    is_here: bool

    def level(self, required: Level | None = None) -> Level:
        """The isolation that can be had, refused when it is weaker than required."""
        ...

    def seat(self, *, alone: bool) -> AbstractContextManager[Seat]:
        """A seat as soon as one is free; `alone`: on a machine where nobody else is at work."""
        ...

    def close(self) -> None:
        """Lets go of whatever is still at work."""
        ...


class Here:
    """This machine. Who takes times here waits for the others who do (`measure.quiet`)."""

    is_here = True

    def __init__(self, workers: int | None = None) -> None:
        self.width = workers or cores()

    def level(self, required: Level | None = None) -> Level:
        return choose_level(required)

    def seat(self, *, alone: bool) -> AbstractContextManager["Here"]:  # noqa: ARG002
        return nullcontext(self)

    def grade(self, shipment: Shipment, challenge: Challenge, on_step: OnStep) -> Bundle:
        return grade_intake(shipment.job(challenge), shipment.intake, on_step)

    def close(self) -> None:
        """Sandboxes end with the threads that opened them."""


def choose_level(required: Level | None = None) -> Level:
    """The strongest level this machine offers, refused when it is weaker than required."""
    best = probe()[0]
    if required is not None and LEVELS.index(best) < LEVELS.index(required):
        raise MissingError(f"this machine offers isolation {best!r}, {required!r} was required")
    return best


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(
    work: Callable[[Work], Result], jobs: Iterable[Work], workers: int | None = None
) -> Iterator[tuple[Work, Result]]:
    """Yields each job with its result as it ends. Threads are enough: the work happens in other
    processes."""
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
        raise InterruptedRunError("interrupted") from None
    finally:
        pool.shutdown(wait=not pending, cancel_futures=True)
