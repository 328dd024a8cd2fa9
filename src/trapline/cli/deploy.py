"""`trapline deploy`: makes fresh workspaces."""

from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.challenge import load, load_all
from trapline.arena.record import Track
from trapline.arena.solving.deploy import deploy as make_workspace
from trapline.arena.solving.deploy import free_workspace

EXAMPLE = "trapline deploy field --challenge kv_cache --entrant me"


def deploy(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The field's folder.")],
    entrant: Annotated[str, typer.Option(help="The entrant that will solve it.")],
    challenge: Annotated[
        list[str] | None, typer.Option(help="Only this one; repeatable. Default: all.")
    ] = None,
    track: Annotated[Track, typer.Option(help="gpu: prompts for CUDA and Triton.")] = "cpu",
    attempt: Annotated[int | None, typer.Option(min=1, help="The number of the attempt.")] = None,
) -> None:
    """Make workspaces that hold only the prompt and the starter."""
    chosen = [load(name, track) for name in challenge or load_all(track)]
    for one in chosen:
        free_workspace(folder, one, entrant, attempt)
    for one in chosen:
        print(make_workspace(folder, one, entrant, attempt))
