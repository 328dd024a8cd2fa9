"""`trapline replay`: grades one bundle again."""

from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.errors import ArenaError, InterruptedRunError, MissingError, UsageError
from trapline.arena.record import Bundle
from trapline.arena.runs.replay import replay as grade_again
from trapline.arena.runs.run import choose_level
from trapline.arena.runs.store import read_bundle
from trapline.cli.exit_codes import NOT_HELD
from trapline.cli.isolation import Isolation
from trapline.cli.reading import opened

EXAMPLE = (
    "trapline replay runs/demo/bundles/3f2a….json; "
    "trapline replay 3f2a --run postgresql://host/database"
)


def replay(
    bundle: Annotated[
        str,
        typer.Argument(
            help="File of an evidence bundle; with --run, its digest or a prefix of it."
        ),
    ],
    run: Annotated[
        str | None,
        typer.Option(help="Folder or postgresql:// URL of the run that holds the bundle."),
    ] = None,
    traps: Annotated[
        Path | None, typer.Option(help="The private trap set that graded it, retired or not.")
    ] = None,
    isolation: Isolation = None,
) -> None:
    """Grade an evidence bundle again; exit code 4 when it was changed or the verdicts differ."""
    try:
        result = grade_again(read_evidence(bundle, run), choose_level(None, isolation), traps)
    except (UsageError, MissingError, InterruptedRunError):
        raise
    except ArenaError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(NOT_HELD) from None
    before, after = result.before, result.after
    print(f"{after.entrant} / {after.challenge}: {after.state}")
    print(f"  before: {before.score} ({before.letter}) at isolation {before.isolation}")
    print(f"  now: {after.score} ({after.letter}) at isolation {after.isolation}")
    moved = ", ".join(f"{name} {points:+.1f}" for name, points in result.moved.items())
    print(f"  difference in points: {moved or 'none'}")
    for difference in result.differences:
        print(f"  differs: {difference}")
    if result.differences:
        raise typer.Exit(NOT_HELD)
    print(result.agreement)


def read_evidence(bundle: str, run: str | None) -> Bundle:
    """A bundle by its file, or by the digest that it has in a run."""
    if run is None:
        return read_bundle(Path(bundle))
    with opened(run) as store:
        return store.bundle(store.find_bundle(bundle))
