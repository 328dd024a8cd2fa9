"""`trapline deploy`: fresh workspaces."""

from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.challenge import load, load_all
from trapline.arena.solving.deploy import deploy as make_workspace
from trapline.arena.solving.deploy import free_workspace


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(epilog="Example: trapline deploy field --challenge kv_cache --entrant me")(deploy)


def deploy(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the field lies.")],
    entrant: Annotated[str, typer.Option(help="Who is going to solve it.")],
    challenge: Annotated[list[str] | None, typer.Option(help="All if none is named.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Make a numbered attempt.")] = None,
) -> None:
    """Make workspaces that hold the prompt and the starter, and nothing else."""
    chosen = [load(name) for name in challenge or load_all()]
    for one in chosen:
        free_workspace(folder, one, entrant, attempt)
    for one in chosen:
        print(make_workspace(folder, one, entrant, attempt))
