"""All traps of the run, and the bugs that entrants' own tests miss."""

from typing import Any

from trapline.arena.record import CellKey
from trapline.arena.report.findings import GRAVITY, opening
from trapline.arena.report.reading import Reading
from trapline.arena.standings.failures import common_failures, silent_bugs
from trapline.arena.standings.moments import Moment, met_traps


def context(reading: Reading) -> dict[str, Any]:
    met = met_traps(reading.run.cells)
    found = [moment_row(reading, moment) for moment in met if moment.fell]
    found.sort(key=lambda row: (-row["share"], row["gravity"], row["challenge"], row["trap"]))
    common = common_failures(reading.run.cells)
    lede = f"{len(found)} of {len(met)} known bugs were found in at least one entrant"
    lede += f", {len(common)} of them in at least half of those examined." if common else "."
    return {
        "title": "Traps",
        "lede": lede,
        "rows": found,
        "clean": len(met) - len(found),
        "silent": _silent(reading),
    }


def moment_row(reading: Reading, moment: Moment) -> dict[str, Any]:
    """A trap, what it catches, who fell, and a link."""
    challenge = reading.field.challenges[moment.challenge]
    info = challenge.trap(moment.trap)
    return {
        "trap": moment.trap,
        "challenge": challenge.title,
        "severity": info.severity,
        "gravity": GRAVITY.get(info.severity, len(GRAVITY)),
        "catches": info.catches,
        "sentence": opening(info.catches or moment.trap),
        "fell": moment.fell,
        "held": moment.held,
        "share": moment.share,
        "asked": len(moment.fell) + len(moment.held),
        "href": f"{reading.field.challenge_href(moment.challenge)}#trap-{moment.trap}",
    }


def _silent(reading: Reading) -> list[tuple[str, str, list[str], str]]:
    """Entrant, challenge, failed checks, and the page that shows them."""
    field = reading.field
    cells = {cell.key: cell for cell in reading.run.cells}
    return [
        (
            bug.entrant,
            field.challenges[bug.challenge].title,
            [*bug.traps, *bug.cases],
            field.cell_href(cells[CellKey(bug.entrant, bug.challenge, bug.track, bug.attempt)]),
        )
        for bug in silent_bugs(reading.run.cells)
    ]
