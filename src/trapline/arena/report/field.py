"""A run arranged for reading: entrants, challenges, and one square for each pair."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from trapline.arena.judge import rubric
from trapline.arena.record import LEVELS, Cell
from trapline.arena.report import slugs
from trapline.arena.report.catalog import ChallengeInfo
from trapline.arena.report.runview import RunView

#: The word that the matrix shows where there is no letter.
WORDS = {
    "hack": "hack",
    "no_answer": "no answer",
    "infra_error": "error",
    "not_run": "not run",
    "waiting": "waiting",
    "running": "running",
    "absent": "—",
}


def word(state: str, attempts: Sequence[Cell]) -> str:
    """The word for a state; why there is no answer, where the first attempt says so."""
    if state == "no_answer" and attempts and attempts[0].answer in ("refused", "truncated"):
        return attempts[0].answer
    return WORDS.get(state, state.replace("_", " "))


class Column(NamedTuple):
    challenge: str
    track: str


@dataclass(frozen=True)
class Square:
    entrant: str
    column: Column
    attempts: Sequence[Cell]
    #: A cell's state, or "waiting", "running", "absent".
    state: str
    score: float | None
    letter: str | None
    href: str | None

    @property
    def graded(self) -> bool:
        """Whether the letter says more than the state."""
        return self.letter is not None and self.state not in WORDS

    @property
    def shown(self) -> str:
        return self.letter if self.letter and self.graded else word(self.state, self.attempts)

    @property
    def heat(self) -> str:
        if self.letter and self.graded:
            return letter_class(self.letter)
        return "s-" + self.state.replace("_", "-")

    @property
    def mark(self) -> str:
        """✗ where the contract fails, ◆ where a critical finding caps the score."""
        if not self.graded:
            return ""
        if self.state == "fail":
            return "✗"
        found = (finding for cell in self.attempts for finding in cell.findings)
        return "◆" if any(finding.severity == "critical" for finding in found) else ""


def letter_class(letter: str) -> str:
    """`g-a-plus`, `g-b`, `g-c-minus`: the CSS class of a letter."""
    return "g-" + letter.lower().replace("-", "-minus").replace("+", "-plus")


class Field:
    """The cells of a run by entrant and column, with the address of every page."""

    def __init__(self, run: RunView, challenges: Mapping[str, ChallengeInfo]) -> None:
        self.run = run
        self.challenges = challenges
        names = {cell.entrant for cell in run.cells} | {planned.entrant for planned in run.waiting}
        self.entrants = sorted(names)
        self.entrant_slugs = slugs.assign(names)
        self.challenge_slugs = slugs.assign(challenges)
        self.track_slugs = slugs.assign(column.track for column in self.columns)

    @cached_property
    def columns(self) -> list[Column]:
        order = {challenge: place for place, challenge in enumerate(self.challenges)}
        found = {Column(cell.challenge, cell.track) for cell in self.run.cells}
        found |= {Column(planned.challenge, planned.track) for planned in self.run.waiting}
        return sorted(found, key=lambda column: (column.track, order[column.challenge]))

    @cached_property
    def tracks(self) -> list[str]:
        return sorted({column.track for column in self.columns})

    @cached_property
    def squares(self) -> dict[tuple[str, Column], Square]:
        attempts: dict[tuple[str, Column], list[Cell]] = {}
        for cell in self.run.cells:
            column = Column(cell.challenge, cell.track)
            attempts.setdefault((cell.entrant, column), []).append(cell)
        pending = self._pending()
        return {
            (entrant, column): self._square(
                entrant, column, attempts.get((entrant, column), []), pending
            )
            for entrant in self.entrants
            for column in self.columns
        }

    def _pending(self) -> dict[tuple[str, Column], str]:
        """Cells without a grade yet; "running" wins where attempts differ."""
        pending: dict[tuple[str, Column], str] = {}
        for planned, status in self.run.waiting.items():
            key = planned.entrant, Column(planned.challenge, planned.track)
            if pending.get(key) != "running":
                pending[key] = status
        return pending

    def _square(
        self,
        entrant: str,
        column: Column,
        attempts: list[Cell],
        pending: Mapping[tuple[str, Column], str],
    ) -> Square:
        attempts = sorted(attempts, key=lambda cell: cell.attempt)
        if not attempts:
            state = pending.get((entrant, column), "absent")
            return Square(entrant, column, (), state, None, None, None)
        scores = [cell.score for cell in attempts if cell.score is not None]
        score = round(fmean(scores), 1) if scores else None
        letter = rubric.letter(score) if score is not None else None
        if len(attempts) == 1:
            letter = attempts[0].letter
        # The worst state of any graded attempt; unmeasured attempts count last.
        states = {cell.state for cell in attempts}
        worst = ("hack", "no_answer", "fail", "pass", "infra_error", "not_run")
        return Square(
            entrant,
            column,
            attempts,
            next(state for state in worst if state in states),
            score,
            letter,
            self.cell_href(attempts[0]),
        )

    def square(self, entrant: str, column: Column) -> Square:
        return self.squares[entrant, column]

    def row(self, entrant: str) -> list[Square]:
        return [self.squares[entrant, column] for column in self.columns]

    def column_title(self, column: Column) -> str:
        title = self.challenges[column.challenge].title
        return f"{title} ({column.track})" if len(self.tracks) > 1 else title

    def entrant_href(self, entrant: str) -> str:
        return f"entrants/{self.entrant_slugs[entrant]}.html"

    def challenge_href(self, challenge: str) -> str:
        return f"challenges/{self.challenge_slugs[challenge]}.html"

    def cell_href(self, cell: Cell) -> str:
        parts = (
            self.entrant_slugs[cell.entrant],
            self.challenge_slugs[cell.challenge],
            self.track_slugs[cell.track],
            str(cell.attempt),
        )
        return f"cells/{'--'.join(parts)}.html"

    @cached_property
    def isolation(self) -> list[str]:
        seen = {cell.isolation for cell in self.run.cells if cell.isolation}
        known: list[str] = [level for level in LEVELS if level in seen]
        return known + sorted(seen - set(LEVELS))

    @cached_property
    def progress(self) -> dict[str, int]:
        statuses = list(self.run.waiting.values())
        return {
            "graded": sum(cell.score is not None for cell in self.run.cells),
            "running": statuses.count("running"),
            "waiting": statuses.count("waiting"),
        }

    def live(self) -> dict[str, Any]:
        return {
            "progress": self.progress,
            "squares": {
                self.square_id(square.entrant, square.column): {
                    "state": square.state,
                    "heat": square.heat,
                    "shown": square.shown,
                    "mark": square.mark,
                    "graded": square.graded,
                    "attempts": [self.cell_href(cell) for cell in square.attempts],
                    "score": square.score,
                    "href": square.href,
                }
                for square in self.squares.values()
            },
        }

    def square_id(self, entrant: str, column: Column) -> str:
        return "--".join(
            (
                "square",
                self.entrant_slugs[entrant],
                self.challenge_slugs[column.challenge],
                self.track_slugs[column.track],
            )
        )
