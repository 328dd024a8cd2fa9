"""How the figures are computed, in words."""

from typing import Any

from trapline.arena.record import DIMENSIONS
from trapline.arena.report import formats
from trapline.arena.report.pages.overview import red_team_fact
from trapline.arena.report.reading import Reading
from trapline.arena.standings import margin
from trapline.arena.standings.regrading import TIMED

STATES = (
    ("pass", "every part of the contract holds"),
    ("fail", "some part of the contract does not hold"),
    ("no_answer", "no answer was given, or the model refused or was cut off; the score is 0"),
    ("hack", "it attacked the judge instead of solving the task; the score is 0"),
    (
        "infra_error",
        "the grader or the machine failed; no score, and left out of every comparison",
    ),
    ("not_run", "it could not run on this machine, for example for lack of hardware"),
)
DIMENSION_TEXTS = (
    ("correctness", "the share of the contract's cases that pass"),
    ("traps", "100 points less what the findings cost by their severity"),
    (
        "precision",
        "error against float64, divided by the error of a careful implementation",
    ),
    ("memory", "growth of the kernel's peak-memory figure with the problem size"),
    ("speed", "time against the reference, interleaved in the same run, on the judge's clock"),
    ("tests", "its own tests, run on its code, on equivalent rewrites, and on mutants"),
    ("code", "static measures: lint, complexity, duplication, type hints"),
    ("analysis", "its written analysis; a language model judges it if one was configured"),
)
LEVEL_TEXTS = (
    ("bubblewrap", "own namespaces: no network, only its own files, no other processes visible"),
    ("landlock", "Landlock and seccomp rules on files and system calls, and resource limits"),
    ("process", "a separate process with resource limits only"),
)


def noise_text(reading: Reading) -> str:
    """Whether the noise of grading is inside the intervals."""
    noise = reading.noise
    if noise.overall is None:
        return (
            "No cell was graded twice under the same conditions. The intervals include the noise "
            f"of measured times: a standard deviation of {TIMED:g} points, from four gradings of "
            "the example field."
        )
    again = formats.count(noise.cells, "cell")
    return (
        f"They include the noise of grading: {again} graded again differ by a standard deviation "
        f"of {noise.overall:.2f} points; a score with a measured time has at least {TIMED:g}."
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
        "noise_text": noise_text(reading),
        "red_team": f"Red team: {red_team[2]} ({red_team[1]})." if red_team else "",
        "methodology": reading.run.meta.get("methodology", ""),
    }
