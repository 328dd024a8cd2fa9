"""Runs cases and traps on a submission: every one of them, or until the first that fails."""

import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np

from trapline.arena.errors import ArenaError, Violation
from trapline.arena.gpu.rig import GpuSubmission
from trapline.arena.judge.traps import Case, Trap
from trapline.arena.process.proxy import Submission
from trapline.arena.process.transcript import Transcript
from trapline.arena.record import CheckResult

#: After this many deaths of its process a submission gets no further chances.
MAX_DEATHS = 12
MAX_HANGS = 3
#: Of a call's time limit, the share that bad input may take as processor time: refusing is quick.
REFUSAL_SHARE = 0.1


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
    submission.processor_share = REFUSAL_SHARE if check.dimension == "robustness" else 1.0
    try:
        check.run(submission, generator(seed, check.id))
        submission.make_later_calls()
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


OnFailure = Callable[[CheckResult, Transcript], None]


def run_checks(
    checks: Iterable[Case | Trap],
    submission: Submission,
    seed: int,
    on_failure: OnFailure = lambda result, transcript: None,
) -> list[CheckResult]:
    """All checks in order. A submission that keeps dying is not asked for ever."""
    found = {check.id: (check, *_asked(check, submission, seed)) for check in checks}
    doubtful = [check for check, result, said in found.values() if _is_doubtful(result, said)]
    if doubtful and isinstance(submission, GpuSubmission) and submission.had_company:
        with submission.alone():
            found |= {check.id: (check, *_asked(check, submission, seed)) for check in doubtful}
    for _, result, said in found.values():
        if result.state == "fail":
            on_failure(result, said)
    return [result for _, result, _ in found.values()]


def _asked(check: Case | Trap, submission: Submission, seed: int) -> tuple[CheckResult, Transcript]:
    patience = MAX_HANGS * submission.config.call_seconds
    if submission.deaths >= MAX_DEATHS or submission.lost_seconds >= patience:
        message = f"not asked: its process had hung or died {submission.deaths} times"
        submission.transcript.exchanges.clear()
        return CheckResult(id=check.id, state="fail", message=message), Transcript()
    result = run_check(check, submission, seed)
    kept = submission.transcript.exchanges if result.state == "fail" else []
    return result, Transcript(list(kept))


def _is_doubtful(result: CheckResult, said: Transcript) -> bool:
    """It ended with an exception or a death: beside others, memory or time may have been short."""
    return result.state == "fail" and not (said.exchanges and said.exchanges[-1].returned)


def first_failure(
    checks: Iterable[Case | Trap], submission: Submission, seed: int
) -> CheckResult | None:
    for check in checks:
        result = run_check(check, submission, seed)
        if result.state == "fail":
            return result
    return None
