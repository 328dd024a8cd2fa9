"""Two or more entrants side by side: each challenge and criterion with its numbers."""

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from trapline.arena.errors import UsageError
from trapline.arena.judge.rubric import letter
from trapline.arena.record import Cell, Record
from trapline.arena.standings.board import Item, attempts, entrants_of, mean
from trapline.arena.standings.conclusion import names
from trapline.arena.standings.criteria import BY_NAME, CRITERIA, Anatomies, Better, Criterion
from trapline.arena.standings.margin import TIE_BAND, Margin, lead, leaders, margin
from trapline.arena.standings.ranking import interval, smallest_visible


class Edge(Record):
    criterion: str
    unit: str
    better: Better
    #: None if it was not measured for an entrant.
    values: dict[str, float | None]
    #: Everyone who ties with the best; empty where fewer than two were measured, or where neither
    #: more nor less is better.
    winners: list[str]
    margin: Margin | None
    #: In words, the reason for each entrant's value.
    behind: dict[str, str]

    @property
    def is_comparison(self) -> bool:
        """Whether at least two entrants have a value."""
        return sum(value is not None for value in self.values.values()) > 1

    def text(self, name: str) -> str:
        """An entrant's value with its unit; empty if it was not measured."""
        value = self.values[name]
        return "" if value is None else BY_NAME[self.criterion].text(value)


class Bout(Record):
    """One challenge, in one track, in which at least two of the entrants have a score."""

    challenge: str
    track: str
    label: str
    scores: dict[str, float | None]
    letters: dict[str, str | None]
    states: dict[str, str | None]
    winners: list[str]
    margin: Margin
    edges: list[Edge]


class Tally(Record):
    a: str
    b: str
    won: int
    lost: int
    tied: int
    #: Mean score of a minus that of b over what both have, None where they share nothing.
    difference: float | None
    #: The smallest mean difference detectable with this many shared challenges.
    smallest_visible: float | None
    #: The 95 % interval of the mean difference, None with fewer than two shared challenges.
    interval: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """Won-lost-tied, for example 4-3-1."""
        return f"{self.won}-{self.lost}-{self.tied}"

    @property
    def sentence(self) -> str:
        """The record in words; the entrant with more wins leads."""
        if self.won == self.lost:
            return f"{self.a} and {self.b} are level, {self.text}"
        ahead, record = (self.a, self.text) if self.won > self.lost else (self.b, self._other_side)
        return f"{ahead} leads {record}"

    @property
    def _other_side(self) -> str:
        return f"{self.lost}-{self.won}-{self.tied}"


class Duel(Record):
    entrants: list[str]
    bouts: list[Bout]
    #: Over all bouts: the mean of each criterion over what all who have it share.
    edges: list[Edge]
    records: list[Tally]
    #: Challenges in which fewer than two of the entrants have a score.
    not_compared: list[str]
    verdict: str

    def record(self, a: str, b: str) -> Tally:
        for tally in self.records:
            if (tally.a, tally.b) == (a, b):
                return tally
            if (tally.a, tally.b) == (b, a):
                return _turned(tally)
        raise KeyError((a, b))


def duel(
    cells: Iterable[Cell], entrants: Sequence[str], anatomies: Anatomies | None = None
) -> Duel:
    """Compares the entrants, in the given order, over all challenges that two of them took.

    `anatomies` by a bundle's digest.
    """
    everything = list(cells)
    _check(everything, entrants)
    tries = attempts(cell for cell in everything if cell.entrant in entrants)
    items = sorted({item for _, item in tries})
    bouts = [
        _bout(item, {name: tries.get((name, item), []) for name in entrants}, anatomies or {})
        for item in items
    ]
    met = [bout for bout in bouts if sum(v is not None for v in bout.scores.values()) > 1]
    records = [_tally(met, a, b) for a, b in combinations(entrants, 2)]
    return Duel(
        entrants=list(entrants),
        bouts=met,
        edges=[_overall(one, met, entrants) for one in CRITERIA if one.summable],
        records=records,
        not_compared=[bout.label for bout in bouts if bout not in met],
        verdict=_verdict(met, records, entrants),
    )


def _check(cells: Sequence[Cell], entrants: Sequence[str]) -> None:
    known = entrants_of(cells)
    for name in entrants:
        if name not in known:
            raise UsageError(f"no entrant {name!r} in this run; its entrants: {', '.join(known)}")
    if len(set(entrants)) < max(2, len(entrants)):
        raise UsageError("a duel needs two or more different entrants")


def _bout(item: Item, tries: dict[str, list[Cell]], anatomies: Anatomies) -> Bout:
    values = {
        name: mean([cell.score for cell in cells if cell.score is not None])
        for name, cells in tries.items()
        if cells
    }
    return Bout(
        challenge=item.challenge,
        track=item.track,
        label=item.label,
        scores={name: values.get(name) for name in tries},
        letters={name: letter(values[name]) if cells else None for name, cells in tries.items()},
        states={name: _states(cells) for name, cells in tries.items()},
        winners=leaders(values),
        margin=margin(lead(values)),
        edges=[_edge(criterion, tries, anatomies) for criterion in CRITERIA],
    )


def _states(cells: Sequence[Cell]) -> str | None:
    """The state, or how many of several attempts pass."""
    states = [cell.state for cell in cells]
    if len(set(states)) < 2:
        return states[0] if states else None
    return f"{states.count('pass')} of {len(states)} pass"


def _edge(criterion: Criterion, tries: dict[str, list[Cell]], anatomies: Anatomies) -> Edge:
    values = {
        name: criterion.value(cells, anatomies) if cells else None for name, cells in tries.items()
    }
    behind = {name: _behind(criterion, cells) for name, cells in tries.items() if cells}
    return _judged(criterion, values, behind)


def _judged(criterion: Criterion, values: dict[str, float | None], behind: dict[str, str]) -> Edge:
    known = {name: value for name, value in values.items() if value is not None}
    ordered = sorted(known.values(), reverse=criterion.better == "higher")
    decided = len(known) > 1 and criterion.better != "neither"
    winners = [
        name
        for name, value in known.items()
        if decided and criterion.margin(ordered[0], value) == "tie"
    ]
    return Edge(
        criterion=criterion.name,
        unit=criterion.unit,
        better=criterion.better,
        values=values,
        winners=sorted(winners),
        margin=criterion.margin(ordered[0], ordered[1]) if decided else None,
        behind=behind,
    )


def _behind(criterion: Criterion, cells: Sequence[Cell]) -> str:
    if criterion.name == "findings":
        causes = (f.cause for cell in cells for f in cell.findings)
        return ", ".join(dict.fromkeys([*causes, *(t for cell in cells for t in cell.fallen())]))
    told = cells[-1].dimensions.get(criterion.name)
    return told.reason if told else ""


def _overall(criterion: Criterion, bouts: Sequence[Bout], entrants: Sequence[str]) -> Edge:
    """Means over the bouts in which everyone who has the criterion anywhere has it."""
    found = [edge for bout in bouts for edge in bout.edges if edge.criterion == criterion.name]
    having = [name for name in entrants if any(edge.values[name] is not None for edge in found)]
    shared = [edge for edge in found if all(edge.values[name] is not None for name in having)]
    values: dict[str, float | None] = dict.fromkeys(entrants)
    if shared:
        values |= {name: mean([edge.values[name] or 0.0 for edge in shared]) for name in having}
    noun = "challenge" if len(shared) == 1 else "challenges"
    count = f"mean of {len(shared)} {noun}" if shared else "no challenge measured for all"
    return _judged(criterion, values, dict.fromkeys(having, count))


def _tally(bouts: Sequence[Bout], a: str, b: str) -> Tally:
    pairs = [(bout.scores[a], bout.scores[b]) for bout in bouts]
    ahead = np.array([x - y for x, y in pairs if x is not None and y is not None])
    words = [margin(difference) for difference in ahead]
    return Tally(
        a=a,
        b=b,
        won=sum(
            word != "tie" and difference > 0 for word, difference in zip(words, ahead, strict=True)
        ),
        lost=sum(
            word != "tie" and difference < 0 for word, difference in zip(words, ahead, strict=True)
        ),
        tied=words.count("tie"),
        difference=float(ahead.mean()) if ahead.size else None,
        smallest_visible=smallest_visible(ahead),
        interval=interval(ahead),
    )


def _turned(tally: Tally) -> Tally:
    return Tally(
        a=tally.b,
        b=tally.a,
        won=tally.lost,
        lost=tally.won,
        tied=tally.tied,
        difference=None if tally.difference is None else -tally.difference,
        smallest_visible=tally.smallest_visible,
        interval=None if tally.interval is None else (-tally.interval[1], -tally.interval[0]),
    )


def _verdict(bouts: Sequence[Bout], records: Sequence[Tally], entrants: Sequence[str]) -> str:
    if not bouts:
        return f"{names(list(entrants))} share no challenge and cannot be compared."
    if len(records) == 1:
        return _two_way(records[0])
    outright = {name: sum(bout.winners == [name] for bout in bouts) for name in entrants}
    counts = ", ".join(f"{name} {count}" for name, count in outright.items())
    return f"Outright wins over {len(bouts)} challenges: {counts}."


def _two_way(tally: Tally) -> str:
    """The record, and the difference of the means only where it can be told from chance."""
    difference = tally.difference or 0.0
    shared = tally.won + tally.lost + tally.tied
    higher = tally.a if difference > 0 else tally.b
    if abs(difference) < TIE_BAND:
        return f"{tally.sentence}; their mean scores tie."
    if tally.interval is None:
        return f"{tally.sentence}, {abs(difference):.1f} points apart on the only shared challenge."
    low, high = sorted(map(abs, tally.interval))
    if tally.interval[0] <= 0 <= tally.interval[1]:
        return f"{tally.sentence}; over {shared} challenges their mean scores cannot be told apart."
    return (
        f"{tally.sentence}; over {shared} challenges the mean score of {higher} is "
        f"{abs(difference):.1f} points higher (95 % interval {low:.1f} to {high:.1f})."
    )
