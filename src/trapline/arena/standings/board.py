"""The input of all standings: the latest grade of each cell, in a fixed order."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trapline.arena.record import Cell

#: An entrant needs this share of the items of the most complete entrant to be ranked or picked.
LEAST_SHARE = 0.5


class Item(NamedTuple):
    """One unit of comparison: a challenge in one of its tracks."""

    challenge: str
    track: str

    @property
    def label(self) -> str:
        """The challenge, with its track unless that is the default."""
        return self.challenge if self.track == "cpu" else f"{self.challenge} ({self.track})"


def item_of(cell: Cell) -> Item:
    return Item(cell.challenge, cell.track)


def age(cell: Cell) -> tuple[float, str, str, int, float]:
    """Older grades sort first; the rest breaks ties between equal times."""
    score = -1.0 if cell.score is None else cell.score
    return (
        cell.started.timestamp(),
        cell.challenge_digest,
        cell.submission_digest,
        cell.seed,
        score,
    )


def latest(cells: Iterable[Cell]) -> list[Cell]:
    """The newest grade of every cell, sorted by its key."""
    newest: dict[tuple[str, str, str, int], Cell] = {}
    for cell in cells:
        known = newest.get(cell.key)
        if known is None or age(cell) > age(known):
            newest[cell.key] = cell
    return [newest[key] for key in sorted(newest)]


def measured(cells: Iterable[Cell]) -> list[Cell]:
    """The newest grades with a score, so without `infra_error` and `not_run`."""
    return [cell for cell in latest(cells) if cell.score is not None]


def entrants_of(cells: Iterable[Cell]) -> list[str]:
    return sorted({cell.entrant for cell in cells})


def items_of(cells: Iterable[Cell]) -> list[Item]:
    return sorted({item_of(cell) for cell in cells})


def attempts(cells: Iterable[Cell]) -> dict[tuple[str, Item], list[Cell]]:
    """The measured attempts of each entrant at each item, first attempt first."""
    found: dict[tuple[str, Item], list[Cell]] = defaultdict(list)
    for cell in measured(cells):
        found[cell.entrant, item_of(cell)].append(cell)
    return dict(found)


def taking_part(cells: Iterable[Cell]) -> set[str]:
    """The entrants with enough measured items to be ranked or picked."""
    taken = Counter(entrant for entrant, _ in attempts(cells))
    most = max(taken.values(), default=0)
    return {name for name, count in taken.items() if count >= LEAST_SHARE * most}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def scores(cells: Iterable[Cell]) -> dict[tuple[str, Item], float]:
    """One score for each entrant and item: the mean over its measured attempts."""
    return {
        key: mean([cell.score for cell in tries if cell.score is not None])
        for key, tries in attempts(cells).items()
    }


def dimension(cells: Sequence[Cell], name: str) -> float | None:
    """The mean of one dimension over these cells, None where none of them has it measured."""
    found = [
        cell.dimensions[name].score
        for cell in cells
        if name in cell.dimensions and cell.dimensions[name].score is not None
    ]
    return mean([value for value in found if value is not None]) if found else None
