"""The records that leave a grade: a cell of the matrix, and what it rests on."""

from datetime import datetime
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

State = Literal["pass", "fail", "hack", "infra_error", "not_run"]
CheckState = Literal["pass", "fail", "not_run"]
Level = Literal["bubblewrap", "landlock", "process"]
#: Weakest first.
LEVELS: tuple[Level, ...] = ("process", "landlock", "bubblewrap")
DIMENSIONS = (
    "correctness",
    "traps",
    "precision",
    "memory",
    "speed",
    "tests",
    "code",
    "analysis",
)


class CellKey(NamedTuple):
    entrant: str
    challenge: str
    track: str
    attempt: int


class Record(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckResult(Record):
    id: str
    state: CheckState
    #: Why it failed, in the words of `expect`; empty when it passed.
    message: str = ""
    seconds: float = 0.0


class Dimension(Record):
    """0–100, or None with the reason why it was not measured."""

    score: float | None
    reason: str
    #: The figures the score was computed from, ready for JSON.
    evidence: dict[str, Any] = Field(default_factory=dict)


class Cell(Record):
    """One entrant's attempt at one challenge, graded."""

    entrant: str
    challenge: str
    track: str = "cpu"
    attempt: int = 1
    #: How the answer was produced: an agent's name, "endpoint", "person", or "" where unknown.
    harness: str = ""
    model: str = ""
    state: State
    score: float | None
    letter: str | None
    #: One sentence: why the state is what it is.
    reason: str
    isolation: str
    dimensions: dict[str, Dimension]
    cases: list[CheckResult]
    traps: list[CheckResult]
    submission_digest: str
    challenge_digest: str
    seed: int
    #: A full grade (long training, more mutants) or a quick one.
    full: bool = False
    versions: dict[str, str]
    started: datetime
    seconds: float
    #: Digest (and file name) of the evidence bundle, "" where nothing could be run.
    bundle: str = ""

    @property
    def key(self) -> CellKey:
        return CellKey(self.entrant, self.challenge, self.track, self.attempt)

    def fallen(self) -> list[str]:
        return [trap.id for trap in self.traps if trap.state == "fail"]


class Bundle(Record):
    """Everything a verdict rests on; content-addressed by the digest of its canonical JSON."""

    format: Literal[1] = 1
    cell: Cell
    #: The submission's text files as executed, path → content (base64 for what is not UTF-8).
    files: dict[str, str]
    binary_files: dict[str, str] = Field(default_factory=dict)
    #: Raw measures: timings, memory peaks, digests of outputs.
    raw: dict[str, Any] = Field(default_factory=dict)
