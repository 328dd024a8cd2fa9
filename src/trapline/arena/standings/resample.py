"""Resampled fields: challenges, their traps and attempts drawn with replacement, regrading noise.

The draws depend on what is drawn, not on names or the order of the input: the same field under
other names gives the same numbers, and a clone of an entrant gets the draws of its original.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trapline.arena.judge import rubric
from trapline.arena.record import Cell
from trapline.arena.standings.board import Item, attempts, entrants_of, item_of, items_of
from trapline.arena.standings.bradley_terry import Floats
from trapline.arena.standings.regrading import SILENT, Noise

#: The share of a score that its traps decide, for challenges without known weights.
TRAP_WEIGHT = 0.3


@dataclass(frozen=True)
class Table:
    """The measured field, ready for drawing."""

    entrants: Sequence[str]
    items: Sequence[Item]
    tries: Mapping[tuple[str, Item], Sequence[Cell]]
    #: Share of the score that the traps decide, by challenge.
    trap_weight: Mapping[str, float]
    noise: Noise = SILENT

    @classmethod
    def of(
        cls, cells: Iterable[Cell], trap_weight: Mapping[str, float], noise: Noise = SILENT
    ) -> "Table":
        tries = attempts(cells)
        flat = [cell for group in tries.values() for cell in group]
        return cls(entrants_of(flat), items_of(flat), tries, trap_weight, noise)

    @property
    def challenges(self) -> list[str]:
        return sorted({item.challenge for item in self.items})


@dataclass(frozen=True)
class Draws:
    """R drawn fields: scores (R, E, I), NaN for none, and how often each item was drawn."""

    scores: Floats
    weights: Floats


def as_graded(table: Table) -> Draws:
    """The field as graded: one round, every item once."""
    shape = (1, len(table.entrants), len(table.items))
    scores = np.full(shape, np.nan)
    for (row, column), cells in _by_position(table):
        scores[0, row, column] = np.mean([cell.score for cell in cells])
    return Draws(scores, np.ones((1, len(table.items))))


def draw(table: Table, rounds: int, seed: int) -> Draws:
    """`rounds` fields: challenges with replacement, then traps inside them, then attempts."""
    scores = np.full((rounds, len(table.entrants), len(table.items)), np.nan)
    shifts = {item: _trap_shifts(table, item, rounds, seed) for item in table.items}
    for (row, column), cells in _by_position(table):
        shift = shifts[table.items[column]]
        drawn = np.stack(
            [
                _shifted(cell, shift[cell.key] + _regraded(cell, table, rounds, seed))
                for cell in cells
            ],
            axis=1,
        )
        scores[:, row, column] = _mean_of_drawn(drawn, cells, seed)
    return Draws(scores, _item_weights(table, rounds, seed))


def _by_position(table: Table) -> Iterator[tuple[tuple[int, int], Sequence[Cell]]]:
    rows = {name: place for place, name in enumerate(table.entrants)}
    columns = {item: place for place, item in enumerate(table.items)}
    for (entrant, item), cells in table.tries.items():
        yield (rows[entrant], columns[item]), cells


def _generator(seed: int, *what: object) -> np.random.Generator:
    digest = hashlib.sha256(repr(what).encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest[:16], dtype=np.uint32)])


def _item_weights(table: Table, rounds: int, seed: int) -> Floats:
    """Tracks of one challenge are drawn together: they share what makes it hard."""
    challenges = table.challenges
    if not challenges:
        return np.zeros((rounds, 0))
    generator = _generator(seed, "challenges", challenges)
    counts = generator.multinomial(len(challenges), _even(len(challenges)), size=rounds)
    return np.stack([counts[:, challenges.index(item.challenge)] for item in table.items], axis=1)


def _even(count: int) -> Floats:
    return np.full(count, 1.0 / count)


def _trap_shifts(
    table: Table, item: Item, rounds: int, seed: int
) -> dict[tuple[str, str, str, int], Floats]:
    """How far each attempt's score moves with the drawn traps."""
    cells = [cell for group in table.tries.values() for cell in group if item_of(cell) == item]
    ids = sorted({trap.id for cell in cells for trap in cell.traps if trap.was_asked})
    if not ids:
        return {cell.key: np.zeros(rounds) for cell in cells}
    costs = _costs(cells, ids)
    generator = _generator(seed, "traps", item.challenge, item.track, ids)
    counts = generator.multinomial(len(ids), _even(len(ids)), size=rounds).astype(np.float64)
    weight = table.trap_weight.get(item.challenge, TRAP_WEIGHT)
    usual = np.clip(100.0 - costs.sum(axis=1), 0.0, 100.0)
    drawn = np.clip(100.0 - costs @ counts.T, 0.0, 100.0)
    shifts = weight * (drawn - usual[:, None])
    return {cell.key: shift for cell, shift in zip(cells, shifts, strict=True)}


def _costs(cells: Sequence[Cell], ids: Sequence[str]) -> Floats:
    """(cells, traps): the points that each sprung trap costs."""
    place = {name: column for column, name in enumerate(ids)}
    costs = np.zeros((len(cells), len(ids)))
    for row, cell in enumerate(cells):
        penalties = {finding.cause: finding.penalty for finding in cell.findings}
        for name in cell.fallen():
            costs[row, place[name]] = penalties.get(name, 100.0 / len(ids))
    return costs


def _regraded(cell: Cell, table: Table, rounds: int, seed: int) -> Floats:
    """How far the score moves because grading it again gives another; by content, as above."""
    deviation = table.noise.of(cell)
    if not deviation:
        return np.zeros(rounds)
    content = (cell.challenge, cell.track, cell.attempt, cell.score, cell.state, cell.fallen())
    return _generator(seed, "regrading", content).normal(0.0, deviation, rounds)


def _shifted(cell: Cell, shift: Floats) -> Floats:
    """A hack stays at 0, a failure or a critical bug under its cap, whatever traps are drawn."""
    score = cell.score or 0.0
    if cell.state == "hack":
        return np.full(shift.shape, score)
    critical = any(finding.severity == "critical" for finding in cell.findings)
    top = rubric.cap(cell.state, critical=critical)
    return np.clip(score + shift, 0.0, max(top, score))


def _mean_of_drawn(drawn: Floats, cells: Sequence[Cell], seed: int) -> Floats:
    """The mean over attempts drawn with replacement; `drawn` is (R, attempts)."""
    rounds, count = drawn.shape
    if count == 1:
        return drawn[:, 0]
    # By content: a clone gets the draws of its original, other entrants get their own.
    content = [(cell.challenge, cell.score, cell.state, cell.fallen()) for cell in cells]
    generator = _generator(seed, "attempts", content)
    chosen = generator.integers(count, size=(rounds, count))
    means: Floats = np.take_along_axis(drawn, chosen, axis=1).mean(axis=1)
    return means
