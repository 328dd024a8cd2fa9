"""What was asked and what was answered in one check."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One call: its arguments, and the answer, the exception or the death that followed."""

    entry: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The remote object whose method was called; None for a function of the submission.
    on: Any = None
    #: The inputs came on the answer's stream, right before its work (GPU track).
    late: bool = False
    #: The check looked at the arguments after the call; the answer is then a pair with them.
    left: bool = False
    #: The check looked whose memory the answer uses.
    looked: bool = False
    #: The caller keeps its arrays and filled them before this call.
    refilled: bool = False
    answer: Any = None
    #: The exception's class name, "" when the call returned.
    raised: str = ""
    message: str = ""
    #: Where it was raised, as `solution.py:12 in f`.
    where: str = ""
    #: Why the process ended, "" when it lived.
    died: str = ""

    @property
    def returned(self) -> bool:
        return not self.raised and not self.died


@dataclass
class Transcript:
    exchanges: list[Exchange] = field(default_factory=list)
