"""A failed check, as the diagnosis sees it."""

from dataclasses import dataclass
from functools import cached_property

from trapline.arena.judge.comparison import is_telling, without_numbers
from trapline.arena.process.transcript import Exchange, Transcript
from trapline.arena.record import CheckResult


@dataclass(frozen=True)
class Failure:
    """One failed check with what was said in it."""

    id: str
    message: str
    transcript: Transcript
    #: Why no answer came, as (exception, place, message without numbers); empty if one did.
    crash: tuple[str, str, str] = ("", "", "")
    #: What the submission does not offer, in words; empty when the check could be asked.
    not_offered: str = ""

    @property
    def crashed(self) -> bool:
        return bool(self.crash[0])

    @property
    def says_something(self) -> bool:
        """The last call was answered, and not with nothing or zero."""
        exchanges = self.transcript.exchanges
        return bool(exchanges) and exchanges[-1].returned and is_telling(exchanges[-1].answer)

    @cached_property
    def end(self) -> tuple[str, str, str]:
        """The crash; or the exception that was raised where another one was due."""
        if self.crashed or " was due" not in self.message or not self.transcript.exchanges:
            return self.crash
        return _raised(self.transcript.exchanges[-1])


def is_not_refused(message: str) -> bool:
    """Bad input was answered, or ended with an exception that refuses nothing."""
    return message.startswith("accepted what") or " was due" in message


def failure_of(result: CheckResult, transcript: Transcript, not_offered: str = "") -> Failure:
    """A failed check, with the crash that ended it, if one did."""
    last = transcript.exchanges[-1] if transcript.exchanges else None
    crash = ("", "", "")
    if last is not None and last.died and result.message.startswith(last.died[:40]):
        crash = ("its process ends", "", without_numbers(last.died)[:200])
    elif last is not None and last.raised and result.message.startswith(f"raised {last.raised}"):
        if " was due" not in result.message:
            crash = _raised(last)
    elif result.message.startswith("not asked"):
        crash = ("its process ends", "", "hangs or dies again and again")
    return Failure(result.id, result.message, transcript, crash, not_offered)


def _raised(exchange: Exchange) -> tuple[str, str, str]:
    if not exchange.raised:
        return "", "", ""
    return f"raises {exchange.raised}", exchange.where, without_numbers(exchange.message)[:200]
