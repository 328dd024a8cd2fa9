"""The letters of a report, held against what grading the same answers measured.

Pure functions over a reported field and the cells of a run under the profile of its prompts.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from trapline.arena.record import Cell, Record
from trapline.arena.standings.margin import steps
from trapline.arena.studies.records import ReportedField

#: The profile whose prompts the report's answers were written to.
PROFILE = "published"
ROUNDS = 2000


class SaidCell(Record):
    """One answer: the letter that was printed, and what was measured."""

    model: str
    entrant: str
    challenge: str
    said: str
    state: str
    score: float | None
    letter: str | None
    #: Causes with their certainty, or why nothing was run.
    measured: str


class Agreement(Record):
    """Kendall's τ-b of two orders, over pairs of entrants within a challenge."""

    of: str
    tau: float | None
    low: float | None = None
    high: float | None = None
    pairs: int
    #: Pairs that both rank, and rank alike or the other way round.
    alike: int
    opposite: int


def models_of(field: ReportedField, entrants: Iterable[str]) -> dict[str, str]:
    """Entrant → the report's name for it, as far as there is one."""
    known = {_plain(model): model for model in field.who.models}
    known |= {_plain(alias): model for alias, model in field.who.aliases.items()}
    return {name: known[_plain(name)] for name in entrants if _plain(name) in known}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def said_cells(field: ReportedField, cells: Sequence[Cell]) -> list[SaidCell]:
    """Every cell that the report has a letter for, in the report's order."""
    models = models_of(field, {cell.entrant for cell in cells})
    matrix = field.matrix()
    readings = {(one.model, one.challenge): one.sentence for one in field.readings.reading}
    found = [
        SaidCell(
            model=models[cell.entrant],
            entrant=cell.entrant,
            challenge=cell.challenge,
            said=matrix[models[cell.entrant], cell.challenge].letter,
            state=cell.state,
            score=cell.score,
            letter=cell.letter,
            measured=_measured(cell, readings.get((models[cell.entrant], cell.challenge), "")),
        )
        for cell in cells
        if cell.profile == PROFILE
        and cell.entrant in models
        and (models[cell.entrant], cell.challenge) in matrix
    ]
    order = {name: place for place, name in enumerate(field.who.difficulty)}
    rank = {name: place for place, name in enumerate(field.who.models)}
    return sorted(found, key=lambda one: (order[one.challenge], rank[one.model]))


def _measured(cell: Cell, reading: str) -> str:
    if cell.score is None:
        return f"{cell.reason}. By reading, not by running: {reading}" if reading else cell.reason
    named = [f"{f.cause} ({f.certainty}): {f.sentence}" for f in cell.findings]
    return " ".join(named) or "no finding"


# --- agreement ------------------------------------------------------------------------------------

#: Entrant → (what was said, what was measured), by challenge.
Pairs = Mapping[str, Mapping[str, tuple[float, float]]]


def letter_agreement(found: Sequence[SaidCell]) -> list[Agreement]:
    """Of all challenges together, with a 95 % interval from resampling them, and of each alone."""
    by: dict[str, dict[str, tuple[float, float]]] = {}
    for one in found:
        if one.score is not None:
            by.setdefault(one.challenge, {})[one.model] = (steps(one.said), one.score)
    each = [agreement(challenge, {challenge: pairs}) for challenge, pairs in by.items()]
    return [agreement("all challenges", by, interval=True), *each]


def criterion_agreement(field: ReportedField, found: Sequence[SaidCell]) -> list[Agreement]:
    """Of the points for each criterion, where the report printed any, with the measured score."""
    scores = {(one.model, one.challenge): one.score for one in found if one.score is not None}
    by: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for card in field.scores.card:
        score = scores.get((card.model, card.challenge))
        if score is None:
            continue
        for name, points in {**card.dimensions, "overall": card.overall}.items():
            by.setdefault(name, {}).setdefault(card.challenge, {})[card.model] = (points, score)
    return [agreement(name, pairs, interval=True) for name, pairs in sorted(by.items())]


def agreement(of: str, pairs: Pairs, *, interval: bool = False) -> Agreement:
    counted = {challenge: _counts(values) for challenge, values in pairs.items()}
    alike, opposite, said_ties, measured_ties = _summed(counted.values())
    found = Agreement(
        of=of,
        tau=_tau(alike, opposite, said_ties, measured_ties),
        pairs=alike + opposite + said_ties + measured_ties,
        alike=alike,
        opposite=opposite,
    )
    if not interval or len(counted) < 2:
        return found
    low, high = _interval(list(counted.values()))
    return found.model_copy(update={"low": low, "high": high})


#: Concordant, discordant, tied in what was said alone, tied in what was measured alone.
_Counts = tuple[int, int, int, int]


def _counts(values: Mapping[str, tuple[float, float]]) -> _Counts:
    alike = opposite = said_ties = measured_ties = 0
    for (a, x), (b, y) in combinations(values.values(), 2):
        if a != b and x != y:
            alike, opposite = alike + ((a > b) == (x > y)), opposite + ((a > b) != (x > y))
        else:
            said_ties, measured_ties = said_ties + (x != y), measured_ties + (a != b)
    return alike, opposite, said_ties, measured_ties


def _summed(counts: Iterable[_Counts]) -> _Counts:
    rows = list(counts)
    return (
        sum(row[0] for row in rows),
        sum(row[1] for row in rows),
        sum(row[2] for row in rows),
        sum(row[3] for row in rows),
    )


def _tau(alike: int, opposite: int, said_ties: int, measured_ties: int) -> float | None:
    both = alike + opposite
    below = ((both + said_ties) * (both + measured_ties)) ** 0.5
    return round((alike - opposite) / below, 3) if below else None


def _interval(counts: Sequence[_Counts]) -> tuple[float | None, float | None]:
    draw = random.Random(0)
    taus = [
        tau
        for _ in range(ROUNDS)
        if (tau := _tau(*_summed(draw.choices(counts, k=len(counts))))) is not None
    ]
    if not taus:
        return None, None
    taus.sort()
    return taus[int(0.025 * len(taus))], taus[min(int(0.975 * len(taus)), len(taus) - 1)]
