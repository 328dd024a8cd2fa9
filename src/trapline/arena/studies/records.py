"""The figures of a hand-written comparison. Every one of them names the file it was printed in."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trapline.arena.record import Record

_GRADE = re.compile(r"([A-F][+-]?)(?: \((?:tie ?)?(?:(\d+)\w\w)?(=?)\))?")


class Grade(Record):
    """A letter, and the rank where one is printed."""

    letter: str
    rank: int | None = None

    @classmethod
    def read(cls, text: str) -> "Grade":
        """From "B+", "B+ (2nd)", "A (tie)", "A- (tie 2nd)" or "B- (4th=)".

        A tie without a number is one for the first place.
        """
        match = _GRADE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a grade")
        letter, rank, _ = match.groups()
        return cls(letter=letter, rank=int(rank) if rank else (1 if "(tie)" in text else None))


class ComparisonStage(Record):
    """Challenges that were set together."""

    name: str
    challenges: list[str]


class Harness(Record):
    name: str
    stage: str
    models: list[str]
    source: str


class Source(Record):
    """A page that figures were printed on."""

    #: As the figures name it.
    file: str
    #: In our words.
    title: str
    #: Its name among the published pages.
    page: str


class Who(Record):
    """Who took part, and in what."""

    #: Who published the pages, and who gave the grades.
    publisher: str
    #: Address of the folder with the pages.
    pages: str
    #: Of the pages that the figures do not call by their own name.
    sources: list[Source]

    models: list[str]
    aliases: dict[str, str]
    difficulty: dict[str, str]
    stages: list[ComparisonStage]
    harness: list[Harness] = []


class GradeRow(Record):
    challenge: str
    source: str
    grades: dict[str, str]

    def read(self) -> dict[str, Grade]:
        return {model: Grade.read(text) for model, text in self.grades.items()}


class Task(GradeRow):
    winner: str
    margin: str = ""


class StageRow(Record):
    stage: str
    source: str
    grades: dict[str, str]

    def read(self) -> dict[str, Grade]:
        return {model: Grade.read(text) for model, text in self.grades.items()}


class RankRow(Record):
    model: str
    rank: int
    #: One letter, or two with a slash.
    average: str
    source: str


class Grades(Record):
    matrix: list[GradeRow]
    task: list[Task]
    overall: list[StageRow]
    rank: list[RankRow]


class Card(Record):
    challenge: str
    model: str
    source: str
    overall: int
    dimensions: dict[str, int]


class PointMargin(Record):
    challenge: str
    winner: str
    points: int
    source: str


class Average(Record):
    source: str
    scores: dict[str, int]
    winner: str
    margin: int
    won: int
    of: int


class Scores(Record):
    card: list[Card]
    margin: list[PointMargin]
    average: Average


class Bout(Record):
    """One challenge of a head-to-head; the winner is a model, "tie" or "split"."""

    challenge: str
    winner: str
    margin: Literal["", "narrow", "moderate", "decisive"] = ""


class Matchup(Record):
    a: str
    b: str
    source: str
    #: How many challenges the two are said to share; every heading that says so.
    overlap: list[int] = []
    #: Who is said to lead or to have won; empty where they are said to be level.
    leader: str = ""
    #: From the leader's side: won-lost or won-lost-tied.
    record: str
    bouts: list[Bout]
    #: By challenge and criterion: who had the edge.
    edges: dict[str, dict[str, str]] = {}


class Fact(Record):
    challenge: str
    quantity: str
    source: str
    unit: str = ""
    note: str = ""
    #: The challenge is about this figure, and the lower one wins.
    lower_wins: bool = False
    values: dict[str, float | str]


class Quoted(Record):
    source: str
    quote: str


class Participation(Quoted):
    model: str
    count: int


class Only(Quoted):
    """Models said to be the only ones that pass a test on the tables."""

    what: str
    test: Literal["took_part_in_all", "never_declines", "narrowest_range", "highest_floor"]
    models: list[str]


class Holders(Quoted):
    """Models said to have a property; complete where no other model is said to have it."""

    property: str
    models: list[str]
    complete: bool


class SaidGrade(Quoted):
    model: str
    challenge: str
    #: A letter, or "took part".
    grade: str


class Arithmetic(Quoted):
    """A figure that follows from two others: part / whole."""

    what: str
    stated: float
    part: float
    whole: float


class Sweep(Quoted):
    """A model said to be better by every criterion."""

    winner: str
    loser: str
    challenge: str


class ClearFirst(Quoted):
    model: str


class Claims(Record):
    participation: list[Participation]
    only: list[Only]
    holders: list[Holders]
    grade: list[SaidGrade]
    arithmetic: list[Arithmetic]
    sweep: list[Sweep]
    clear_first: list[ClearFirst]


class _Matchups(Record):
    matchup: list[Matchup]


class _Facts(Record):
    fact: list[Fact]


class CodeReading(Record):
    """What the code of an answer shows that was not run."""

    challenge: str
    model: str
    sentence: str


class _Readings(Record):
    reading: list[CodeReading] = []


class ReportedField(Record):
    who: Who = Field(alias="field")
    grades: Grades
    scores: Scores
    matchups: _Matchups
    facts: _Facts
    claims: Claims
    #: Ours, not the report's.
    readings: _Readings = _Readings()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "ReportedField":
        """From the data as loaded, one table a file."""
        return cls.model_validate(dict(data))

    def matrix(self) -> dict[tuple[str, str], Grade]:
        return {
            (model, row.challenge): grade
            for row in self.grades.matrix
            for model, grade in row.read().items()
        }

    def harness_of(self, model: str, challenge: str) -> str:
        """The harness that is named for it, empty where none is."""
        stages = {stage.name for stage in self.who.stages if challenge in stage.challenges}
        named = (h.name for h in self.who.harness if h.stage in stages and model in h.models)
        return next(named, "")

    def source(self, name: str) -> Source:
        """The page of this name, or the one that the figures call so."""
        own = Source(file=name, title=re.sub(r"[-_]", " ", name.removesuffix(".md")), page=name)
        return next((one for one in self.who.sources if one.file == name), own)

    def took(self, model: str) -> list[str]:
        """The challenges that the matrix has a grade of this model in."""
        return [row.challenge for row in self.grades.matrix if model in row.grades]
