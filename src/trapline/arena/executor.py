"""Runs independent jobs side by side on this machine."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from trapline.arena.errors import InterruptedRunError

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
    pool = ThreadPoolExecutor(workers or cores())
    pending: dict[Future[Result], Job] = {pool.submit(work, job): job for job in jobs}
    try:
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), future.result()
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise InterruptedRunError("interrupted") from None
    finally:
        pool.shutdown(wait=not pending, cancel_futures=True)
