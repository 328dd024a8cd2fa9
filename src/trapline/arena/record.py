"""The records that leave a grade: a cell of the matrix, and what it rests on."""

from datetime import datetime
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

State = Literal["pass", "fail", "no_answer", "hack", "infra_error", "not_run"]
#: A case passes or fails. A trap is `sprung` when its bug is a finding, `hidden` when it fails for
#: another reason, `crashed` when no answer came.
CheckState = Literal["pass", "fail", "sprung", "hidden", "crashed", "not_asked", "not_run"]
Severity = Literal["critical", "major", "minor"]
Certainty = Literal["confirmed", "likely"]
FindingDimension = Literal["traps", "robustness"]
#: Whether a model answered; `missing`: it said nothing that could be used.
AnswerState = Literal["given", "refused", "truncated", "missing"]
#: What an answer did with the planted flaw of its prompt; "" where the prompt has none.
FlawOutcome = Literal["", "noticed", "followed", "neither"]
CaseDimension = Literal["correctness", "robustness"]
Level = Literal["bubblewrap", "landlock", "process"]
Track = Literal["cpu", "gpu"]
#: Weakest first.
LEVELS: tuple[Level, ...] = ("process", "landlock", "bubblewrap")
DIMENSIONS = (
    "correctness",
    "traps",
    "robustness",
    "precision",
    "memory",
    "speed",
    "tests",
    "code",
    "analysis",
)


#: More than any answer took, in tokens or turns.
MOST_TOKENS = 10**12


class CellKey(NamedTuple):
    entrant: str
    challenge: str
    track: Track
    attempt: int


class Record(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckResult(Record):
    id: str
    state: CheckState
    #: The dimension that it counts for.
    dimension: Literal["correctness", "traps", "robustness"] = "correctness"
    #: Why it failed, in the words of `expect`; empty when it passed.
    message: str = ""
    #: Of a hidden trap: the cause behind which it is hidden; empty for a small echo of others.
    behind: str = ""
    seconds: float = 0.0

    @property
    def was_asked(self) -> bool:
        return self.state not in ("not_run", "not_asked")

    @property
    def accuses(self) -> bool:
        """Cells graded before findings existed have `fail` for `sprung`."""
        return self.state in ("sprung", "fail")


class Finding(Record):
    """One root cause of failures."""

    #: The id of the trap whose bug it is, or `unnamed`.
    cause: str
    #: `confirmed`: the wrong answers equal those of the trap's mutant. `likely`: the pattern of
    #: failures is that of the bug.
    certainty: Certainty
    severity: Severity
    sentence: str
    #: The failing checks that this cause explains, the clearest one first.
    explains: list[str]
    #: Points that it costs in its dimension.
    penalty: float = 0.0
    #: The failing call in words.
    call: str = ""
    #: Where the submission raised, as `solution.py:12 in f`; empty when it answered.
    where: str = ""
    #: Which dimension this finding lowers.
    dimension: FindingDimension = "traps"


class TrapSetName(Record):
    """A private trap set that graded a cell beside the challenge's own traps."""

    name: str
    version: str
    digest: str
    #: The ids of its traps for this challenge.
    traps: list[str]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Dimension(Record):
    """0–100, or None with the reason why it was not measured."""

    score: float | None
    reason: str
    #: The figures the score was computed from, ready for JSON.
    evidence: dict[str, Any] = Field(default_factory=dict)


class Origin(Record):
    """How an answer was produced, as its harness recorded it; never graded.

    The entrant may have written the record: what could not be stored or printed is refused.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    #: solved, no_answer, refused, truncated (the model's), or infra_error (the provider's).
    status: str = ""
    harness_version: str = ""
    #: The host of an endpoint, or the agent's name.
    provider: str = ""
    #: The model's version, as its provider named it in a reply.
    model_version: str = ""
    #: When the answer was complete, ISO 8601.
    answered: str = ""
    #: All that the model read, cached tokens included.
    input_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    #: The part of them that came from a cache.
    cached_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    output_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    #: Replies of the model.
    turns: int = Field(default=0, ge=0, le=MOST_TOKENS)
    cost_usd: float | None = Field(default=None, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    #: What was asked for, for example temperature, top_p, max_tokens, effort, seed.
    sampling: dict[str, float | int | str] = Field(default_factory=dict)
    #: US dollars per million tokens, by "input" and "output".
    price_usd: dict[str, float] = Field(default_factory=dict)
    #: For example rounds, seconds, budget_usd.
    limits: dict[str, float] = Field(default_factory=dict)


#: What a GPU's times depend on, in a cell's `versions`: cells that differ in them are never
#: ranked together.
GPU_FACTS = ("gpu", "driver", "cuda driver", "torch", "triton", "buffers")


class Cell(Record):
    """One entrant's attempt at one challenge, graded."""

    entrant: str
    challenge: str
    track: Track = "cpu"
    attempt: int = 1
    #: The prompt that it answers, as a profile of the challenge; empty for the challenge's own.
    profile: str = ""
    #: How the answer was produced: an agent's name, "endpoint", "person", or "" where unknown.
    harness: str = ""
    model: str = ""
    origin: Origin | None = None
    state: State
    score: float | None
    letter: str | None
    #: One sentence: why the state is what it is.
    reason: str
    isolation: str
    dimensions: dict[str, Dimension]
    cases: list[CheckResult]
    traps: list[CheckResult]
    #: Figures that the challenge names, such as perplexity; compared, never scored.
    measures: dict[str, float] = Field(default_factory=dict)
    #: Root causes of the failures: the most certain first, of these accepted bad input last.
    findings: list[Finding] = Field(default_factory=list)
    flaw: FlawOutcome = ""
    submission_digest: str
    challenge_digest: str
    #: The private traps that were asked too.
    trap_set: TrapSetName | None = None
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

    @property
    def answer(self) -> AnswerState:
        """Whether the model gave an answer, or why not; of `no_answer` its record says which."""
        status = self.origin.status if self.origin else ""
        if self.state == "no_answer":
            known: dict[str, AnswerState] = {"refused": "refused", "truncated": "truncated"}
            return known.get(status, "missing")
        return "missing" if self.state == status == "infra_error" else "given"

    def fallen(self) -> list[str]:
        """The traps whose bugs are findings."""
        return [trap.id for trap in self.traps if trap.accuses]


class Bundle(Record):
    """Everything a verdict rests on; content-addressed by the digest of its canonical JSON."""

    format: Literal[1] = 1
    cell: Cell
    #: The submission's text files as executed, path → content (base64 for what is not UTF-8).
    files: dict[str, str]
    binary_files: dict[str, str] = Field(default_factory=dict)
    #: Raw measures: timings, memory peaks, digests of outputs.
    raw: dict[str, Any] = Field(default_factory=dict)
