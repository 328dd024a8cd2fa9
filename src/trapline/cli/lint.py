"""`trapline lint`: checks that the numbers of a report agree with each other."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trapline.arena.challenge import load_all
from trapline.arena.runs.lint import Contradiction, Terms, lint_run
from trapline.arena.studies import ComparisonRow, contradictions
from trapline.cli.exit_codes import NOT_HELD
from trapline.cli.reading import PUBLISHED, Run, opened, published

EXAMPLE = "trapline lint published"


def lint(
    run: Run = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the contradictions between the numbers of a run or of the published field.

    Exit code 0: no contradictions. Exit code 4: contradictions.
    """
    found = contradictions(published()) if run == PUBLISHED else _lint(run)
    if as_json:
        print(json.dumps({"contradictions": [each.model_dump() for each in found]}))
    else:
        _print(found)
    if found:
        raise typer.Exit(NOT_HELD)


def _lint(run: str | None) -> list[Contradiction]:
    with opened(run) as store:
        cells = store.cells()
        asked = {cell.challenge for cell in cells}
        terms = {name: Terms.of(one) for name, one in load_all().items() if name in asked}
        return lint_run(cells, terms, store.bundle, len(store.waiting()), store.damaged())


def _print(found: Sequence[Contradiction] | Sequence[ComparisonRow]) -> None:
    console = Console()
    if found:
        table = Table("rule", "where", "what")
        for each in found:
            table.add_row(*(Text(part, overflow="fold") for part in _parts(each)))
        console.print(table)
    console.print(f"{len(found)} contradictions" if len(found) != 1 else "1 contradiction")


def _parts(found: Contradiction | ComparisonRow) -> tuple[str, str, str]:
    if isinstance(found, Contradiction):
        return found.rule, found.where, found.message
    source = ", ".join(name.split("_")[0] for name in found.sources)
    note = f" ({found.note})" if found.note else ""
    return found.kind, found.what, f"printed {found.reported}, ours {found.ours}{note} [{source}]"
