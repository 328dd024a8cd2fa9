"""The grade matrix as a table that fits 80 columns."""

import math
from collections.abc import Sequence

from rich.table import Table

from trapline.arena.challenge import load_all
from trapline.arena.record import Cell

_COLOURS = {"A": "green", "B": "cyan", "C": "yellow", "D": "magenta", "F": "red"}


def matrix(cells: Sequence[Cell]) -> Table:
    """Entrants down, challenges across; the best attempt of each cell."""
    columns = [name for name in load_all() if any(cell.challenge == name for cell in cells)]
    best: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        place = (cell.entrant, cell.challenge)
        if place not in best or (cell.score or -1) > (best[place].score or -1):
            best[place] = cell
    table = Table(padding=(0, 0), collapse_padding=True)
    table.add_column("entrant", overflow="fold", max_width=16)
    for name in columns:
        table.add_column(_abbreviated(name), justify="right")
    for entrant in sorted({cell.entrant for cell in cells}):
        table.add_row(entrant, *(_show(best.get((entrant, name))) for name in columns))
    return table


def _abbreviated(name: str) -> str:
    """Seven letters a word at most, one word a line: eight columns fit a terminal."""
    return "\n".join(word[:7] for word in name.split("_")[:3])


def _show(cell: Cell | None) -> str:
    if cell is None:
        return "·"
    if cell.score is None or cell.letter is None:
        return "infra" if cell.state == "infra_error" else "–"
    colour = _COLOURS[cell.letter[0]]
    note = {"fail": "✗", "hack": "☠"}.get(cell.state, "")
    return f"[{colour}]{cell.letter}{note} {whole(cell.score)}[/{colour}]"


def whole(score: float) -> int:
    """Points cut off, not rounded: a 90 beside a B+ would contradict it."""
    return math.floor(round(score, 1))
