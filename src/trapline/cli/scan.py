"""`trapline scan`: searches answers for leaked judge files and for copies."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trapline.arena.runs.field import find_entries
from trapline.arena.runs.field_scan import Suspicion, scan_field
from trapline.cli.exit_codes import NOT_HELD

EXAMPLE = "trapline scan field --trust gold"


def scan(
    field: Annotated[Path, typer.Argument(help="<entrant>/<challenge>/solution.py")],
    challenge: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    trust: Annotated[
        list[str] | None, typer.Option(help="An entrant that may hold the gold answer; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search answers and transcripts for canaries, trap names, gold text and copies.

    A finding is a reason to look closer, not a verdict.

    Exit code 0: no findings. Exit code 4: findings.
    """
    found = scan_field(find_entries(field, challenge or []), frozenset(trust or []))
    if as_json:
        print(json.dumps({"suspicions": [each.model_dump() for each in found]}))
    else:
        _print(found)
    if found:
        raise typer.Exit(NOT_HELD)


def _print(found: list[Suspicion]) -> None:
    console = Console()
    if found:
        table = Table("entrant", "challenge", "kind", "what")
        for each in found:
            share = f" ({each.leak.share:.0%})" if each.leak.share is not None else ""
            what = f"{each.where}: {each.leak.source}{share}, {each.leak.detail}"
            cells = (f"{each.entrant} #{each.attempt}", each.challenge, each.leak.kind, what)
            table.add_row(*(Text(cell, overflow="fold") for cell in cells))
        console.print(table)
    console.print(f"{len(found)} findings" if len(found) != 1 else "1 finding")
