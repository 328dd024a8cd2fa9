"""The grade matrix in a terminal of any width, with a legend."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trapline.arena.judge import rubric
from trapline.arena.record import Cell
from trapline.arena.report.catalog import describe
from trapline.arena.report.field import Column, Field, Square
from trapline.arena.report.runview import RunView

_COLOURS = {"A": "green", "B": "cyan", "C": "yellow", "D": "magenta", "F": "red"}
#: Of a square that has no letter.
_SHORT = {"infra_error": "our error", "absent": "·"}
_MARKS = {
    "✗": f"the contract fails (at most {rubric.FAIL_CAP:g})",
    "◆": f"a critical finding (at most {rubric.CRITICAL_CAP:g})",
    "·": "no answer in the field",
}


def matrix(cells: Sequence[Cell], width: int) -> RenderableType:
    """Whole names at any width: challenges that do not fit go into a further table."""
    field = Field(RunView(cells), describe(cells))
    tables = [_table(field, columns) for columns in _groups(field, width)]
    level = ", ".join(field.isolation)
    lines = [_legend(field), f"isolation: {level}" if level else ""]
    return Group(*tables, *(Text(line) for line in lines if line))


def _table(field: Field, columns: Sequence[Column]) -> Table:
    """Entrants down, challenges across, one word of their names per line."""
    table = Table(padding=(0, 0), collapse_padding=True)
    table.add_column("entrant", overflow="fold")
    for column in columns:
        table.add_column(column.challenge.replace("_", "\n"), justify="right", no_wrap=True)
    for entrant in field.entrants:
        squares = (field.square(entrant, column) for column in columns)
        table.add_row(Text(entrant), *map(_show, squares))
    return table


def _groups(field: Field, width: int) -> Iterator[list[Column]]:
    """The columns in groups that fit beside the names; at least one in each."""
    names = max(len(name) for name in [*field.entrants, "entrant"]) + 2
    group: list[Column] = []
    room = width - names
    for column in field.columns:
        needed = _width(field, column) + 1
        if group and needed > room:
            yield group
            group, room = [], width - names
        group.append(column)
        room -= needed
    yield group


def _width(field: Field, column: Column) -> int:
    shown = [_show(field.square(name, column)).cell_len for name in field.entrants]
    return max([*shown, *map(len, column.challenge.split("_"))])


def _legend(field: Field) -> str:
    """The marks that occur."""
    squares = field.squares.values()
    seen = {square.mark for square in squares} | {"·" for s in squares if s.state == "absent"}
    return "; ".join(f"{mark} {text}" for mark, text in _MARKS.items() if mark in seen)


def _show(square: Square) -> Text:
    if not square.graded or square.score is None or square.letter is None:
        return Text(_SHORT.get(square.state, square.shown))
    mark = square.mark
    return Text(f"{square.letter}{mark} {square.score:.1f}", style=_COLOURS[square.letter[0]])
