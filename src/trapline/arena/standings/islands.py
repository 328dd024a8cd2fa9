"""Groups of entrants connected by shared challenges: only these can be compared."""

from collections.abc import Iterable, Sequence

from trapline.arena.standings.board import Item


def islands(entrants: Sequence[str], taken: Iterable[tuple[str, Item]]) -> list[list[str]]:
    """Groups connected by chains of shared items, largest first, then by name."""
    groups: list[tuple[set[str], set[Item]]] = []
    by_entrant: dict[str, set[Item]] = {name: set() for name in entrants}
    for name, item in taken:
        by_entrant[name].add(item)
    for name, items in by_entrant.items():
        joined = [group for group in groups if group[1] & items]
        names = {name}.union(*(group[0] for group in joined))
        reach = items.union(*(group[1] for group in joined))
        groups = [group for group in groups if group not in joined] + [(names, reach)]
    return sorted((sorted(names) for names, _ in groups), key=lambda names: (-len(names), names))
