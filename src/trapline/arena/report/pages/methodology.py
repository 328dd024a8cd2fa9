"""How the figures were made, in words."""

from typing import Any

from trapline.arena.record import DIMENSIONS
from trapline.arena.report.pages.overview import red_team_fact
from trapline.arena.report.reading import Reading
from trapline.arena.standings import margin

STATES = (
    ("pass", "every part of the contract holds"),
    ("fail", "some part of the contract does not hold"),
    ("hack", "it reached for the judge instead of the task; worth nothing"),
    (
        "infra_error",
        "something of ours failed; says nothing about the entrant and counts for nobody",
    ),
    ("not_run", "it could not be run here, for instance without the hardware it needs"),
)
DIMENSION_TEXTS = (
    ("correctness", "the share of the contract's cases that hold"),
    ("traps", "named bugs it did not have, weighted by severity"),
    ("precision", "error against a float64 oracle, in units of a careful implementation's error"),
    ("memory", "growth of the kernel's peak figure with the size of the problem"),
    ("speed", "time against the reference, interleaved in the same run, on the judge's clock"),
    ("tests", "its own tests: on its code, on harmless rewrites of it, on mutants"),
    ("code", "static measures: lint, complexity, duplication, type hints"),
    ("analysis", "its written analysis; a language model judges it if one was named, never alone"),
)
LEVEL_TEXTS = (
    ("bubblewrap", "own namespaces: no network, no files but its own, no other processes in sight"),
    ("landlock", "kernel rules on files and system calls, and limits, in our namespaces"),
    ("process", "a separate process with limits only"),
)


def context(reading: Reading) -> dict[str, Any]:
    red_team = red_team_fact(reading)
    return {
        "title": "Methodology",
        "ranking": reading.ranking,
        "dimension_names": DIMENSIONS,
        "states": STATES,
        "dimension_texts": DIMENSION_TEXTS,
        "level_texts": LEVEL_TEXTS,
        "margin_rule": margin.RULE,
        "red_team": f"Red team: {red_team[2]} ({red_team[1]})." if red_team else "",
        "methodology": reading.run.meta.get("methodology", ""),
    }
