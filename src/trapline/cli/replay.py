"""`trapline replay`: one verdict again."""

from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.replay import replay as grade_again
from trapline.arena.run import choose_level
from trapline.cli.main import NOT_HELD


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(epilog="Example: trapline replay runs/demo/bundles/3f2a….json")(replay)


def replay(
    bundle: Annotated[Path, typer.Argument(help="An evidence bundle, named by its digest.")],
) -> None:
    """Grade an evidence bundle again; exit code 4 when it was changed or the verdicts differ."""
    try:
        result = grade_again(bundle, choose_level())
    except UsageError:
        raise
    except ArenaError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(NOT_HELD) from None
    cell = result.after
    print(f"{cell.entrant} / {cell.challenge}: {cell.state}, {cell.score} ({cell.letter})")
    for difference in result.differences:
        print(f"  differs: {difference}")
    if result.differences:
        raise typer.Exit(NOT_HELD)
    print("the same verdicts as before")
