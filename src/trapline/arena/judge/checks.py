"""Runs cases and traps on a submission: every one of them, or until the first that fails."""

import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np

from trapline.arena.errors import ArenaError, Violation
from trapline.arena.judge.traps import Case, Trap
from trapline.arena.process.proxy import Submission
from trapline.arena.process.transcript import Transcript
from trapline.arena.record import CheckResult

#: After this many deaths of its process a submission gets no further chances.
MAX_DEATHS = 12
MAX_HANGS = 3


def generator(seed: int, name: str) -> np.random.Generator:
    """Each check draws from its own stream, so that adding one leaves the others' inputs alone."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def unexaminable(error: Exception) -> str:
    """Certification shows that no right answer gets here."""
    return f"its answer cannot be examined: {type(error).__name__}: {error}"


def run_check(check: Case | Trap, submission: Submission, seed: int) -> CheckResult:
    """One check; whatever the submission does becomes data."""
    started = time.perf_counter()
    message = ""
    submission.transcript.exchanges.clear()
    try:
        check.run(submission, generator(seed, check.id))
    except Violation as violation:
        message = str(violation) or "the contract does not hold"
    except ArenaError:
        raise
    except Exception as error:  # the check stumbled over an answer of an unforeseen form
        message = unexaminable(error)
    finally:
        submission.settle()
    return CheckResult(
        id=check.id,
        state="fail" if message else "pass",
        dimension=check.dimension,
        message=message[:2000],
        seconds=round(time.perf_counter() - started, 4),
    )


def run_checks(
    checks: Iterable[Case | Trap],
    submission: Submission,
    seed: int,
    on_failure: Callable[[CheckResult, Transcript], None] = lambda result, transcript: None,
) -> list[CheckResult]:
    """All checks in order. A submission that keeps dying is not asked for ever."""
    results: list[CheckResult] = []
    patience = MAX_HANGS * submission.config.call_seconds
    for check in checks:
        if submission.deaths >= MAX_DEATHS or submission.lost_seconds >= patience:
            message = f"not asked: its process had hung or died {submission.deaths} times"
            result = CheckResult(id=check.id, state="fail", message=message)
            submission.transcript.exchanges.clear()
        else:
            result = run_check(check, submission, seed)
        results.append(result)
        if result.state == "fail":
            on_failure(result, Transcript(list(submission.transcript.exchanges)))
    return results


def first_failure(
    checks: Iterable[Case | Trap], submission: Submission, seed: int
) -> CheckResult | None:
    for check in checks:
        result = run_check(check, submission, seed)
        if result.state == "fail":
            return result
    return None
