"""Prompts with a planted flaw: did an answer notice it, or follow it?

The flaw is in the pseudo-code of a profile; the golden test beside it is right and prevails. What
an answer does with the two is read from its behaviour alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.errors import Violation
from trapline.arena.judge.checks import run_check
from trapline.arena.judge.traps import Case
from trapline.arena.process.proxy import Stub, Submission
from trapline.arena.profile import GOLDEN, FlawPlan
from trapline.arena.record import CheckResult, Finding, FlawOutcome


def flaw_outcome(
    challenge: Challenge,
    flaw: FlawPlan,
    submission: Submission,
    traps: Sequence[CheckResult],
    findings: Sequence[Finding],
    seed: int,
) -> FlawOutcome:
    """`followed`: the wrong answers are those of the flaw's mutant. `noticed`: the golden test
    passes, and so does the trap of that mutant, whose numbers no prompt shows."""
    if any(one.cause == flaw.mutant and one.certainty == "confirmed" for one in findings):
        return "followed"
    trap = next(result for result in traps if result.id == flaw.mutant)
    golden = run_check(Case("golden", _golden(challenge)), submission, seed)
    return "noticed" if (trap.state, golden.state) == ("pass", "pass") else "neither"


def _golden(challenge: Challenge) -> Callable[[Submission, np.random.Generator], None]:
    check = challenge.profile_module(GOLDEN).check

    def run(submission: Submission, _: np.random.Generator) -> None:
        try:
            check(_Asked(submission))
        except AssertionError as error:
            raise Violation(f"the golden test fails: {error}") from None

    return run


class _Asked:
    """The submission as the module that a golden test calls."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._submission, name)
        return lambda *args, **kwargs: call(*map(_sendable, args), **kwargs)


def _sendable(value: Any) -> Any:
    """A language model stays here; the submission calls it across the channel."""
    return Stub(log_probs=value.log_probs) if hasattr(value, "log_probs") else value
