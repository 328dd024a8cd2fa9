"""`trapline challenges`: what there is to solve, and the traps in it."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from trapline.arena.challenge import Challenge, load_all


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        epilog="Example: trapline challenges --json",
    )(challenges)


def challenges(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the challenges, their tracks and how many traps wait in each; --json names the traps."""
    if as_json:
        print(json.dumps({"challenges": [_describe(one) for one in load_all().values()]}))
        return
    table = Table("challenge", "difficulty", "tracks", "cases", "traps")
    for one in load_all().values():
        plan = one.plan
        counts = str(len(one.cases)), str(len(one.traps))
        table.add_row(plan.id, plan.difficulty, ", ".join(plan.tracks), *counts)
    Console().print(table)


def _describe(challenge: Challenge) -> dict[str, object]:
    traps = [
        {"id": trap.id, "catches": trap.catches, "severity": trap.severity}
        for trap in challenge.traps
    ]
    plan = challenge.plan
    return {"id": plan.id, "difficulty": plan.difficulty, "tracks": plan.tracks, "traps": traps}
