"""The grade matrix as a table that fits 80 columns."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from trapline.arena.record import Cell
from trapline.arena.report.catalog import describe
from trapline.arena.report.field import Field, Square
from trapline.arena.report.runview import RunView

_COLOURS = {"A": "green", "B": "cyan", "C": "yellow", "D": "magenta", "F": "red"}


def matrix(cells: Sequence[Cell]) -> Table:
    """Entrants down, challenges across; attempts are averaged as in the report."""
    field = Field(RunView(cells), describe(cells))
    table = Table(padding=(0, 0), collapse_padding=True)
    table.add_column("entrant", overflow="fold", max_width=16)
    for column in field.columns:
        table.add_column(_abbreviated(column.challenge), justify="right")
    for entrant in field.entrants:
        table.add_row(Text(entrant, overflow="fold"), *map(_show, field.row(entrant)))
    return table


def _abbreviated(name: str) -> str:
    """At most seven letters per word, one word per line: eight columns fit a terminal."""
    return "\n".join(word[:7] for word in name.split("_")[:3])


def _show(square: Square) -> str:
    if not square.attempts:
        return "·"
    if square.score is None or square.letter is None:
        return "infra" if square.state == "infra_error" else "–"
    colour = _COLOURS[square.letter[0]]
    note = {"fail": "✗", "hack": "☠"}.get(square.state, "")
    return f"[{colour}]{square.letter}{note} {whole(square.score)}[/{colour}]"


def whole(score: float) -> int:
    """Rounds down: 89.6 shown as 90 would contradict its B+."""
    return math.floor(round(score, 1))
