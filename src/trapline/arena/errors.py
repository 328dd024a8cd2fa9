"""Exceptions for what goes wrong on our side, and violations for what a submission does."""

from typing import Any


class ArenaError(Exception):
    """Something of ours failed: a sandbox, a file, a limit. Never a verdict on a submission."""


class UsageError(ArenaError):
    """The caller asked for something that does not exist or contradicts itself (exit code 2)."""


class MissingError(ArenaError):
    """Something needed is not installed or not permitted on this machine (exit code 3)."""


class ChangedError(ArenaError):
    """Evidence is not what its digest says (exit code 4)."""


class NotMeasuredError(ArenaError):
    """One dimension could not be measured, for a reason that is ours."""


class InterruptedRunError(ArenaError):
    """The user pressed Ctrl-C (exit code 130)."""

    def __init__(self, then: str = "what was finished is kept, the same command goes on") -> None:
        super().__init__("interrupted")
        #: What is kept, and what the same command does.
        self.then = then


class Violation(Exception):
    """A submission broke its contract; the message says how, in a sentence a reader can act on."""


class SubmissionRaised(Violation):
    """The submission raised an exception where the contract asks for an answer."""

    def __init__(self, kind: str, bases: tuple[str, ...], message: str, where: str = "") -> None:
        super().__init__(f"raised {kind}: {message}" if message else f"raised {kind}")
        self.kind = kind
        self.bases = bases
        self.message = message
        #: File, line and function of the submission, as `solution.py:12 in f`; "" when unknown.
        self.where = where
        #: The positional arguments as the call left them, where it was observed.
        self.left: tuple[Any, ...] = ()
        #: The frame that reported it: header and body.
        self.reply: tuple[dict[str, Any], Any] | None = None


class SubmissionDied(Violation):
    """The submission's process ended, hung, or broke the protocol in the middle of a call."""


class SubmissionHung(SubmissionDied):
    """The submission's process used up the time of a call."""
