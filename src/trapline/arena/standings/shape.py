"""The shape of an entrant: strengths and weaknesses against the field, with evidence."""

from collections.abc import Iterable, Sequence
from typing import Literal

from trapline.arena.record import DIMENSIONS, Cell, Record
from trapline.arena.standings.board import Item, attempts, dimension, entrants_of, mean
from trapline.arena.standings.moments import Moment, met_traps

#: Points above or below the rest of the field that make a strength or a weakness.
NOTABLE = 5.0
#: A trap characterises an entrant if at most this share of the others had the same outcome.
RARE = 1.0 / 3.0
#: One dimension's values by item and entrant.
Table = dict[Item, dict[str, float]]


class Trait(Record):
    kind: Literal["dimension", "trap"]
    #: The dimension or the trap.
    name: str
    #: One sentence with the numbers.
    evidence: str
    #: How far from the field: points for a dimension, share of the others for a trap (times 100).
    size: float
    challenges: list[str]


class Shape(Record):
    entrant: str
    strengths: list[Trait]
    weaknesses: list[Trait]
    #: Mean of each dimension over the entrant's challenges, None where never measured.
    dimensions: dict[str, float | None]


def shapes(cells: Iterable[Cell], limit: int = 6) -> list[Shape]:
    everything = list(cells)
    tries = attempts(everything)
    met = met_traps(everything)
    tables = {name: _table(tries, name) for name in DIMENSIONS}
    names = entrants_of(cell for group in tries.values() for cell in group)
    return [_shape(name, tries, tables, met, limit) for name in names]


def _table(tries: dict[tuple[str, Item], list[Cell]], name: str) -> Table:
    """The values of one dimension by item and entrant."""
    table: Table = {}
    for (entrant, item), cells in sorted(tries.items()):
        value = dimension(cells, name)
        if value is not None:
            table.setdefault(item, {})[entrant] = value
    return table


def _shape(
    entrant: str,
    tries: dict[tuple[str, Item], list[Cell]],
    tables: dict[str, Table],
    met: Sequence[Moment],
    limit: int,
) -> Shape:
    traits = [_dimension_trait(entrant, name, tables[name]) for name in DIMENSIONS]
    found = [(good, trait) for good, trait in traits if trait is not None]
    found += [pair for moment in met if (pair := _trap_trait(entrant, moment)) is not None]
    found.sort(key=lambda pair: (-pair[1].size, pair[1].kind, pair[1].name, pair[1].challenges))
    mine = [cell for (name, _), group in tries.items() for cell in group if name == entrant]
    return Shape(
        entrant=entrant,
        strengths=[trait for good, trait in found if good][:limit],
        weaknesses=[trait for good, trait in found if not good][:limit],
        dimensions={name: dimension(mine, name) for name in DIMENSIONS},
    )


def _dimension_trait(entrant: str, name: str, table: Table) -> tuple[bool, Trait | None]:
    """Compares with the others on the same challenges, to correct for their difficulty."""
    mine, others, where = [], [], []
    for item, values in table.items():
        if entrant in values and len(values) > 1:
            mine.append(values[entrant])
            others.append((sum(values.values()) - values[entrant]) / (len(values) - 1))
            where.append(item.label)
    if not mine or abs(mean(mine) - mean(others)) < NOTABLE:
        return False, None
    ahead = mean(mine) - mean(others)
    count = "challenge" if len(where) == 1 else f"{len(where)} challenges"
    evidence = f"{name} {mean(mine):.1f}, the others {mean(others):.1f} on the same {count}"
    return ahead > 0, Trait(
        kind="dimension", name=name, evidence=evidence, size=abs(ahead), challenges=where
    )


def _trap_trait(entrant: str, moment: Moment) -> tuple[bool, Trait] | None:
    fell = entrant in moment.fell
    alike, unlike = (moment.fell, moment.held) if fell else (moment.held, moment.fell)
    others = len(alike) + len(unlike) - 1
    if entrant not in alike or not unlike or (len(alike) - 1) / others > RARE:
        return None
    did, did_not = ("has", "do not") if fell else ("does not have", "do")
    evidence = f"{did} the bug {moment.trap}; {len(unlike)} of {others} others {did_not}"
    where = Item(moment.challenge, moment.track).label
    size = 100.0 * len(unlike) / others
    return not fell, Trait(
        kind="trap", name=moment.trap, evidence=evidence, size=size, challenges=[where]
    )
