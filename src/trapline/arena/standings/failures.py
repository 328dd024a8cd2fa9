"""Common failures: traps that most entrants fall into, bugs that their own tests miss."""

from collections.abc import Iterable

from trapline.arena.record import Cell, Record, Track
from trapline.arena.standings.board import latest
from trapline.arena.standings.moments import Moment, met_traps

#: A failure is common if at least this share of the entrants has it.
COMMON_FROM = 0.5


class SilentBug(Record):
    """A submission that passes its own tests and fails ours."""

    entrant: str
    challenge: str
    track: Track
    attempt: int
    #: How many of its own tests passed.
    own_tests: int
    traps: list[str]
    #: Contract cases that fail.
    cases: list[str]


def common_failures(cells: Iterable[Cell], least: float = COMMON_FROM) -> list[Moment]:
    """Traps that at least this share of the entrants who met them fell into, most common first."""
    common = [moment for moment in met_traps(cells) if moment.fell and moment.share >= least]
    return sorted(common, key=lambda m: (-m.share, -len(m.fell), m.challenge, m.track, m.trap))


def silent_bugs(cells: Iterable[Cell]) -> list[SilentBug]:
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
