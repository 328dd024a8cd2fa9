"""`trapline duel`: entrants side by side."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trapline.arena.record import Cell
from trapline.arena.standings.anatomy import Anatomy, anatomy
from trapline.arena.standings.duel import Duel, Edge
from trapline.arena.standings.duel import duel as compare
from trapline.cli.reading import RUN_HELP, ProfileOption, cells_of, opened

EXAMPLE = "trapline duel gold hasty --run runs/demo"


def duel(
    entrants: Annotated[list[str], typer.Argument(help="Two or more entrants.")],
    run: Annotated[str | None, typer.Option(help=RUN_HELP)] = None,
    profile: ProfileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare entrants challenge by challenge and criterion by criterion."""
    cells = cells_of(run, profile)
    result = compare(cells, entrants, _anatomies(run, cells, entrants))
    if as_json:
        print(result.model_dump_json())
        return
    console = Console()
    console.print(Text(result.verdict))
    console.print(_bouts(result))
    if len(result.records) > 1:
        console.print(Text("\n".join(tally.sentence for tally in result.records)))
    if any(edge.winners for edge in result.edges):
        console.print(_edges(result))
    if result.not_compared:
        console.print(Text(f"not compared: {', '.join(result.not_compared)}"))


def _anatomies(run: str | None, cells: list[Cell], entrants: list[str]) -> dict[str, Anatomy]:
    """Of these entrants' answers, by their bundles' digests."""
    digests = [cell.bundle for cell in cells if cell.entrant in entrants and cell.bundle]
    if not digests:
        return {}
    with opened(run) as store:
        return {digest: anatomy(store.bundle(digest).files) for digest in digests}


def _table(first: str, entrants: list[str]) -> Table:
    table = Table()
    table.add_column(first, overflow="fold")
    for name in entrants:
        table.add_column(Text(name, overflow="fold"), justify="right", overflow="fold")
    table.add_column("edge", overflow="fold")
    table.add_column("margin")
    return table


def _bouts(result: Duel) -> Table:
    table = _table("challenge", result.entrants)
    for bout in result.bouts:
        values = (_score(bout.scores[name], bout.letters[name]) for name in result.entrants)
        edge = _winners(bout.winners, result.entrants)
        table.add_row(bout.label, *values, edge, bout.margin)
    return table


def _edges(result: Duel) -> Table:
    table = _table("criterion", result.entrants)
    for edge in result.edges:
        if edge.is_comparison:
            table.add_row(edge.criterion, *_values(edge, result.entrants))
    return table


def _values(edge: Edge, entrants: list[str]) -> list[Text | str]:
    values: list[Text | str] = [edge.text(name) or "–" for name in entrants]
    return [*values, _winners(edge.winners, entrants), edge.margin or ""]


def _winners(winners: list[str], entrants: list[str]) -> Text:
    return Text("tie" if set(winners) == set(entrants) else ", ".join(winners), overflow="fold")


def _score(score: float | None, letter: str | None) -> str:
    return "–" if score is None else f"{score:.1f} {letter}"
