"""`trapline adopt`: makes a field of a tree of answers to other prompts."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.challenge import refuse_unknown_profile
from trapline.arena.errors import UsageError
from trapline.arena.record import Track
from trapline.arena.runs.adopt import Adopted, AdoptOptions
from trapline.arena.runs.adopt import adopt as adopt_tree

EXAMPLE = "trapline adopt answers --out field --adapters examples/adapters/published"


def adopt(
    tree: Annotated[Path, typer.Argument(help="<entrant>/<task>/…, each with an answer.")],
    out: Annotated[Path, typer.Option(help="The field's folder; must be new or empty.")],
    adapters: Annotated[
        Path | None,
        typer.Option(
            help="Adapters: <entrant>/<challenge>.py, or <challenge>.py for all; .cu on the GPU "
            "track."
        ),
    ] = None,
    track: Annotated[Track, typer.Option(help="gpu: answers in CUDA C++.")] = "cpu",
    repair: Annotated[
        bool,
        typer.Option(
            help="Mend CUDA files that cannot compile (prose, headers), name what was done, and "
            "call the entrant <entrant>-repaired."
        ),
    ] = False,
    profile: Annotated[
        str, typer.Option(help="The prompt that the answers were written to.")
    ] = "published",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read a tree of answers to another prompt, write it as a field, and say what was found.

    Nothing of an answer is executed, and nothing is changed unless --repair asks for it. Grade the
    field with `trapline grade`.
    """
    refuse_unknown_profile(profile)
    if repair and track == "cpu":
        raise UsageError("--repair mends CUDA files: add --track gpu")
    found = adopt_tree(tree, out, AdoptOptions(profile, adapters, track, repair))
    if as_json:
        print(json.dumps({"field": str(out), "answers": [one.model_dump() for one in found]}))
        return
    for one in found:
        print(_line(one))
    count = sum(one.adopted for one in found)
    print(f"adopted {count} of {len(found)} task folders into {out}")


def _line(one: Adopted) -> str:
    where = f"{one.source} → {one.challenge}" if one.challenge else one.source
    further = [note for note in one.notes if note not in one.sentence]
    return "\n    ".join([f"{where}: {one.sentence}", *further])
