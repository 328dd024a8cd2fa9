"""What distinguishes entrants: traps that split the field, challenges that spread it."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from trapline.arena.record import Cell, Record
from trapline.arena.standings.board import Item, item_of, latest, mean, scores


class Moment(Record):
    """One trap and its outcomes; an entrant fell if any of its attempts did."""

    challenge: str
    track: str
    trap: str
    fell: list[str]
    held: list[str]
    #: 1 if half the field fell, 0 if all or none did.
    split: float
    #: Share of the entrants that fell.
    share: float
    #: Points by which those that held score higher on this challenge than those that fell.
    gap: float = 0.0


class Spread(Record):
    challenge: str
    track: str
    entrants: int
    best: float
    worst: float
    #: Standard deviation of the scores.
    deviation: float


def met_traps(cells: Iterable[Cell]) -> list[Moment]:
    """Every trap that was set, by challenge and trap."""
    met: dict[tuple[Item, str], dict[str, bool]] = defaultdict(dict)
    newest = latest(cells)
    table = scores(newest)
    for cell in newest:
        for trap in cell.traps:
            if trap.was_asked:
                key = item_of(cell), trap.id
                fell_before = met[key].get(cell.entrant, False)
                met[key][cell.entrant] = fell_before or trap.accuses
    return [_moment(item, trap, met[item, trap], table) for item, trap in sorted(met)]


def _moment(
    item: Item, trap: str, fell_by_name: dict[str, bool], table: dict[tuple[str, Item], float]
) -> Moment:
    fell = sorted(name for name, fell in fell_by_name.items() if fell)
    share = len(fell) / len(fell_by_name)
    sides: tuple[list[float], list[float]] = ([], [])
    for name, fallen in fell_by_name.items():
        if (name, item) in table:
            sides[fallen].append(table[name, item])
    return Moment(
        challenge=item.challenge,
        track=item.track,
        trap=trap,
        fell=fell,
        held=sorted(set(fell_by_name).difference(fell)),
        split=4.0 * share * (1.0 - share),
        share=share,
        gap=mean(sides[0]) - mean(sides[1]) if all(sides) else 0.0,
    )


def moments(cells: Iterable[Cell], limit: int | None = 10) -> list[Moment]:
    """The traps that separate the field most: an even split times the gap in score.

    Of traps of one challenge with the same outcomes, only the first is kept: the others would
    repeat it.
    """
    split = [moment for moment in met_traps(cells) if moment.fell and moment.held]
    split.sort(key=lambda m: (-m.split * max(m.gap, 0.0), -m.split, m.challenge, m.track, m.trap))
    first: dict[tuple[str, str, tuple[str, ...]], Moment] = {}
    for moment in split:
        first.setdefault((moment.challenge, moment.track, tuple(moment.fell)), moment)
    return list(first.values())[:limit]


def spreads(cells: Iterable[Cell]) -> list[Spread]:
    """Challenges by the spread of their scores, widest first."""
    table = scores(cells)
    found = []
    for item in sorted({item for _, item in table}):
        values = [value for (_, where), value in table.items() if where == item]
        found.append(
            Spread(
                challenge=item.challenge,
                track=item.track,
                entrants=len(values),
                best=max(values),
                worst=min(values),
                deviation=float(np.std(values)),
            )
        )
    return sorted(found, key=lambda each: (-each.deviation, each.challenge, each.track))
