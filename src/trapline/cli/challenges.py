"""`trapline challenges`: the challenges and their traps."""

import json
import tomllib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import trapline.challenges

EXAMPLE = "trapline challenges --json"
_DIFFICULTIES = ("medium", "hard", "extra hard", "research")


def challenges(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the challenges, their tracks, and how many cases and traps each has.

    --json also names the traps.
    """
    if as_json:
        print(json.dumps({"challenges": _with_traps()}))
        return
    table = Table("challenge", "difficulty", "tracks", "cases", "traps")
    for row in summaries():
        table.add_row(*row)
    Console().print(table)


def summaries() -> list[tuple[str, str, str, str, str]]:
    """A row of the table per challenge, from the text of its files.

    Importing the challenges to count their traps would take longer than everything else.
    """
    (root,) = trapline.challenges.__path__
    rows = []
    for path in sorted(Path(root).glob("*/challenge.toml")):
        described = tomllib.loads(path.read_text(encoding="utf-8"))
        code = "\n".join(module.read_text(encoding="utf-8") for module in path.parent.glob("*.py"))
        cases, refusals, traps = (
            code.count(f"\n@{kind}") for kind in ("case", "robustness", "trap")
        )
        tracks = ", ".join(described.get("tracks", ["cpu"]))
        rows.append(
            (described["id"], described["difficulty"], tracks, str(cases + refusals), str(traps))
        )
    return sorted(rows, key=lambda row: _DIFFICULTIES.index(row[1]))


def _with_traps() -> list[dict[str, object]]:
    from trapline.arena.challenge import load_all

    return [
        {
            "id": one.plan.id,
            "difficulty": one.plan.difficulty,
            "tracks": one.plan.tracks,
            "traps": [
                {"id": trap.id, "catches": trap.catches, "severity": trap.severity}
                for trap in one.traps
            ],
        }
        for one in load_all().values()
    ]
