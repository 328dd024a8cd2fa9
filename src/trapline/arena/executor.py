"""Runs independent jobs side by side on this machine."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int | None = None
) -> Iterator[tuple[Job, Result]]:
    """Yields each job with its result as it ends. Threads are enough: the work happens in other
    processes."""
    with ThreadPoolExecutor(workers or cores()) as pool:
        pending: dict[Future[Result], Job] = {pool.submit(work, job): job for job in jobs}
        try:
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            for future in pending:
                future.cancel()
