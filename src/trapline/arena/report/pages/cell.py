"""One cell: every dimension with its evidence, what failed and why, and the source."""

from typing import Any

from markupsafe import Markup

from trapline.arena.record import DIMENSIONS, Bundle, Cell, Finding
from trapline.arena.report import evidence, source
from trapline.arena.report.catalog import ChallengeInfo, TrapInfo
from trapline.arena.report.field import WORDS, Column, letter_class
from trapline.arena.report.reading import Reading
from trapline.arena.standings.costs import total_cost

MOST_FILES = 12
#: All files of one page together; a page stays far below two megabytes.
MOST_SOURCE = 150_000


def context(reading: Reading, cell: Cell) -> dict[str, Any]:
    challenge = reading.field.challenges[cell.challenge]
    square = reading.field.square(cell.entrant, Column(cell.challenge, cell.track))
    bundle = reading.run.bundles.get(cell.bundle)
    shown, left_out = files(bundle) if bundle else ([], 0)
    graded = cell.letter and cell.state != "hack"
    state_class = "s-" + cell.state.replace("_", "-")
    return {
        "title": f"{cell.entrant}: {challenge.title}",
        "cell": cell,
        "challenge": challenge,
        "siblings": square.attempts,
        "cost": total_cost([cell]),
        "shown": cell.letter if graded else WORDS.get(cell.state, cell.state),
        "heat": letter_class(cell.letter) if graded and cell.letter else state_class,
        "findings": _findings(cell, challenge),
        "fallen": [(t, challenge.trap(t.id)) for t in cell.traps if t.accuses],
        "other": [t for t in cell.traps if t.state in ("hidden", "crashed")],
        "held": [trap for trap in cell.traps if trap.state == "pass"],
        "failed_cases": [case for case in cell.cases if case.state == "fail"],
        "passed_cases": [case for case in cell.cases if case.state == "pass"],
        "unasked": [c for c in [*cell.cases, *cell.traps] if not c.was_asked],
        "dimensions": [
            (name, cell.dimensions[name], evidence.rows(cell.dimensions[name].evidence))
            for name in DIMENSIONS
            if name in cell.dimensions
        ],
        "leaks": bundle.raw.get("contamination", []) if bundle else [],
        "files": shown,
        "left_out": left_out,
        "bundle_href": f"bundles/{cell.bundle}.json" if bundle else "",
    }


def _findings(cell: Cell, challenge: ChallengeInfo) -> list[tuple[Finding, TrapInfo, str]]:
    """Each finding with its trap and the message of the check that shows it best."""
    messages = {check.id: check.message for check in [*cell.cases, *cell.traps]}
    return [
        (finding, challenge.trap(finding.cause), messages.get(finding.explains[0], ""))
        for finding in cell.findings
    ]


def files(bundle: Bundle) -> tuple[list[tuple[str, Markup, str]], int]:
    """The submitted text files, the solution first, up to the limits of a page."""
    ordered = sorted(bundle.files.items(), key=lambda item: (_rank(item[0]), item[0]))
    shown: list[tuple[str, Markup, str]] = []
    room = MOST_SOURCE
    for path, text in ordered[:MOST_FILES]:
        if room <= 0:
            break
        part = text[:room]
        lines = text.count("\n") + bool(text and not text.endswith("\n"))
        cut = min(len(part), source.LONGEST)
        note = f"{lines} lines" + ("" if cut >= len(text) else f", the first {cut} characters")
        shown.append((path, source.render(path, part), note))
        room -= cut
    return shown, len(bundle.files) + len(bundle.binary_files) - len(shown)


def _rank(path: str) -> int:
    if path == "solution.py":
        return 0
    return 1 if path.endswith(".py") else 2
