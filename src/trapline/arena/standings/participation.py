"""The ranking of those that took enough challenges; the others are listed without a place."""

from collections.abc import Iterable
from typing import Any

from trapline.arena.record import Cell
from trapline.arena.standings.board import measured, taking_part
from trapline.arena.standings.conclusion import names
from trapline.arena.standings.ranking import Ranking, ranking


def ranked(cells: Iterable[Cell], **options: Any) -> Ranking:
    """`ranking` over the entrants that took at least half of what the most complete one took."""
    everything = list(cells)
    enough = taking_part(everything)
    few = sorted({cell.entrant for cell in measured(everything)} - enough)
    found = ranking([cell for cell in everything if cell.entrant not in few], **options)
    if not few:
        return found
    apart = f" Without a place, because of too few challenges: {names(few)}."
    return found.model_copy(update={"few": few, "conclusion": found.conclusion + apart})
