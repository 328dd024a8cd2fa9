"""If you could only pick one: nine criteria and their rules."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trapline.arena.record import Cell, Record
from trapline.arena.standings.board import (
    attempts,
    dimension,
    entrants_of,
    item_of,
    mean,
    measured,
    scores,
    taking_part,
)
from trapline.arena.standings.margin import Margin, lead, leaders, margin
from trapline.arena.standings.trajectory import by_difficulty

HARD = ("extra hard", "research")
Values = dict[str, float]
Difficulty = Mapping[str, str]


class Pick(Record):
    criterion: str
    rule: str
    #: Everyone within the tie band of the best; empty if the rule has no data.
    winners: list[str]
    margin: Margin | None
    #: The deciding figure of everyone considered.
    values: dict[str, float]
    #: The unit of the figure.
    unit: str
    #: Why there is no pick; empty otherwise.
    why_not: str

    @property
    def decides(self) -> bool:
        """Whether it sets anybody apart: there is a winner, and not everyone considered wins."""
        return 0 < len(self.winners) < len(self.values)


@dataclass(frozen=True)
class _Criterion:
    name: str
    rule: str
    unit: str
    value: Callable[[Sequence[Cell], Difficulty], Values]
    nothing: str
    #: Differences below this are ties.
    band: float = 1.0
    #: Whether entrants with too few measurements are left out.
    needs_share: bool = True
    #: A pick needs a figure above this.
    above: float = -math.inf


def picks(cells: Iterable[Cell], difficulty: Difficulty | None = None) -> list[Pick]:
    """One pick for each of the nine criteria; `difficulty` by challenge."""
    counted = measured(cells)
    eligible = taking_part(counted)
    return [_pick(criterion, counted, difficulty or {}, eligible) for criterion in CRITERIA]


def _pick(
    criterion: _Criterion, cells: Sequence[Cell], difficulty: Difficulty, eligible: set[str]
) -> Pick:
    values = criterion.value(cells, difficulty)
    if criterion.needs_share:
        values = {name: value for name, value in values.items() if name in eligible}
    earned = {name: value for name, value in values.items() if value > criterion.above}
    return Pick(
        criterion=criterion.name,
        rule=criterion.rule,
        winners=leaders(earned, criterion.band),
        margin=margin(lead(values)) if len(values) > 1 else None,
        values=values,
        unit=criterion.unit,
        why_not="" if earned else criterion.nothing,
    )


def _participation(cells: Sequence[Cell], _: Difficulty) -> Values:
    return {
        name: float(len({item_of(cell) for cell in cells if cell.entrant == name}))
        for name in entrants_of(cells)
    }


def _dimensions(*names: str) -> Callable[[Sequence[Cell], Difficulty], Values]:
    """The mean of these dimensions over an entrant's items; an item counts if it has them all."""

    def value(cells: Sequence[Cell], _: Difficulty) -> Values:
        found: dict[str, list[float]] = {}
        for (entrant, _item), tries in attempts(cells).items():
            each = [dimension(tries, name) for name in names]
            known = [score for score in each if score is not None]
            if len(known) == len(names):
                found.setdefault(entrant, []).append(mean(known))
        return {name: mean(values) for name, values in found.items()}

    return value


def _hard(cells: Sequence[Cell], difficulty: Difficulty) -> Values:
    found: dict[str, list[float]] = {}
    for (entrant, item), score in scores(cells).items():
        if difficulty.get(item.challenge) in HARD:
            found.setdefault(entrant, []).append(score)
    return {name: mean(values) for name, values in found.items()}


def _first_time_right(cells: Sequence[Cell], _: Difficulty) -> Values:
    found: dict[str, list[float]] = {}
    for (entrant, _item), tries in attempts(cells).items():
        if tries[0].cases:
            found.setdefault(entrant, []).append(100.0 * (tries[0].state == "pass"))
    return {name: mean(values) for name, values in found.items()}


def _floor(cells: Sequence[Cell], _: Difficulty) -> Values:
    found: Values = {}
    for (entrant, _item), score in scores(cells).items():
        found[entrant] = min(score, found.get(entrant, score))
    return found


def _improvement(cells: Sequence[Cell], difficulty: Difficulty) -> Values:
    slopes = {each.entrant: each.slope for each in by_difficulty(cells, difficulty)}
    return {name: slope for name, slope in slopes.items() if slope is not None}


CRITERIA = (
    _Criterion(
        "build a production system",
        "highest mean of correctness, traps, tests and code over the challenges that have all four",
        "points",
        _dimensions("correctness", "traps", "tests", "code"),
        "no cell has all four dimensions",
    ),
    _Criterion(
        "solve a hard algorithmic problem",
        "highest mean score over the extra hard and research challenges",
        "points",
        _hard,
        "no extra hard or research challenge was measured",
    ),
    _Criterion(
        "write numerically perfect code",
        "highest mean precision",
        "points",
        _dimensions("precision"),
        "precision was not measured",
    ),
    _Criterion(
        "get a correct answer quickly",
        "largest share of first attempts that hold every contract case",
        "% of first attempts",
        _first_time_right,
        "no contract case was run",
    ),
    _Criterion(
        "most reliable across diverse tasks",
        "highest worst score over all challenges",
        "points",
        _floor,
        "nothing was measured",
    ),
    _Criterion(
        "most improved as it gets harder",
        "largest gain in score from one difficulty to the next, by least squares",
        "points per step",
        _improvement,
        "no entrant measured at two difficulties improves",
        above=0.0,
    ),
    _Criterion(
        "best documentation",
        "highest mean of the analysis dimension",
        "points",
        _dimensions("analysis"),
        "no analysis was judged",
    ),
    _Criterion(
        "most complete participation",
        "most challenges (and tracks) with a score",
        "challenges",
        _participation,
        "nothing was measured",
        needs_share=False,
    ),
    _Criterion(
        "best tests",
        "highest mean of the tests dimension",
        "points",
        _dimensions("tests"),
        "tests were not measured",
    ),
)
