"""Where the field goes wrong: traps that most fall into, bugs that an entrant's own tests miss."""

from collections.abc import Iterable

from trapline.arena.record import Cell, Record
from trapline.arena.standings.board import latest
from trapline.arena.standings.moments import Moment, met_traps

#: From this share of the entrants on, falling is what one does.
COMMON_FROM = 0.5


class SilentBug(Record):
    """A submission whose own tests pass and which fails ours."""

    entrant: str
    challenge: str
    track: str
    attempt: int
    #: How many of its own tests passed.
    own_tests: int
    traps: list[str]
    #: Contract cases that do not hold: worse than a trap, and just as unnoticed.
    cases: list[str]


def common_failures(cells: Iterable[Cell], least: float = COMMON_FROM) -> list[Moment]:
    """Traps that at least this share of the entrants who met them fell into, most common first."""
    common = [moment for moment in met_traps(cells) if moment.fell and moment.share >= least]
    return sorted(common, key=lambda m: (-m.share, -len(m.fell), m.challenge, m.track, m.trap))


def silent_bugs(cells: Iterable[Cell]) -> list[SilentBug]:
    """Cells in which the entrant's own tests say all is well although a check of ours failed."""
    found = []
    for cell in latest(cells):
        passed = own_tests_passed(cell)
        failed = [case.id for case in cell.cases if case.state == "fail"]
        if passed and (cell.fallen() or failed):
            found.append(
                SilentBug(
                    entrant=cell.entrant,
                    challenge=cell.challenge,
                    track=cell.track,
                    attempt=cell.attempt,
                    own_tests=passed,
                    traps=cell.fallen(),
                    cases=failed,
                )
            )
    return found


def own_tests_passed(cell: Cell) -> int:
    """How many of its own tests pass on its own code; 0 unless all of them do."""
    tests = cell.dimensions.get("tests")
    report = tests.evidence.get("own") if tests else None
    if not isinstance(report, dict) or report.get("failed") != 0 or report.get("code") != 0:
        return 0
    passed = report.get("passed")
    return passed if isinstance(passed, int) else 0
