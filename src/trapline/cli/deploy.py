"""`trapline deploy`: makes fresh workspaces."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from trapline.arena import output_paths
from trapline.arena.challenge import Challenge, load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.profile import profile_names
from trapline.arena.record import Track
from trapline.arena.solving.deploy import claim_field, free_workspace
from trapline.arena.solving.deploy import deploy as make_workspace

EXAMPLE = "trapline deploy field --challenge kv_cache --entrant me"
#: The variant that solve and deploy ask for.
Variant = Annotated[
    Literal["flawed"] | None,
    typer.Option(
        help="Prompts with a flaw planted in the pseudo-code and a golden test that contradicts it "
        "and decides; the grade says whether the answer noticed.",
        show_default=False,
    ),
]


def deploy(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The field's folder.")],
    entrant: Annotated[str, typer.Option(help="The entrant that will solve it.")],
    challenge: Annotated[
        list[str] | None, typer.Option(help="Only this one; repeatable. Default: all.")
    ] = None,
    track: Annotated[Track, typer.Option(help="gpu: prompts for CUDA and Triton.")] = "cpu",
    attempt: Annotated[int | None, typer.Option(min=1, help="The number of the attempt.")] = None,
    variant: Variant = None,
) -> None:
    """Make workspaces that hold only the prompt and the starter."""
    chosen = asked_challenges(challenge or [], variant, track)
    output_paths.folder(folder, "a field", "; DIR names another place")
    for one in chosen:
        free_workspace(folder, one, entrant, attempt)
    claim_field(folder, variant or "", track)
    for one in chosen:
        print(make_workspace(folder, one, entrant, attempt))


def asked_challenges(
    names: list[str], variant: str | None, track: Track = "cpu"
) -> list[Challenge]:
    """These challenges, or all that have this variant."""
    if variant is None:
        return [load(name, track) for name in names or load_all(track)]
    if track == "gpu":
        raise UsageError(f"the gpu track has no {variant} prompts: leave out --track gpu")
    having = [one.id for one in load_all().values() if variant in profile_names(one.folder)]
    for name in names:
        if load(name).id not in having:
            raise UsageError(
                f"{name} has no {variant} prompt; the challenges that have one are: "
                f"{', '.join(having)}"
            )
    return [load(name, profile=variant) for name in names or having]
