"""The first page: conclusion, matrix, standings."""

from typing import Any

from trapline.arena.report import evidence, formats, plots
from trapline.arena.report.pages.traps import moment_row
from trapline.arena.report.reading import Reading
from trapline.arena.standings.moments import moments
from trapline.arena.standings.picks import Pick, picks

PODIUM = 6
MOST_IN_PLOT = 40
MOST_MOMENTS = 4


def context(reading: Reading) -> dict[str, Any]:
    ranking = reading.ranking
    return {
        "title": reading.run.meta.get("title") or f"Run {reading.run.name}",
        "ranking": ranking,
        "podium": ranking.standings[:PODIUM],
        "caveat": caveat(reading),
        "facts": facts(reading),
        "order": reading.order,
        "forest": _forest(reading),
        "picks": pick_rows(reading),
        "moments": [
            moment_row(reading, moment) for moment in moments(reading.run.cells, MOST_MOMENTS)
        ],
    }


def caveat(reading: Reading) -> str:
    """Limits of the run that a reader must know before quoting the ranking."""
    attempts = max((len(s.attempts) for s in reading.field.squares.values()), default=0)
    tries = "one attempt" if attempts <= 1 else f"up to {attempts} attempts"
    noun = "challenge" if len(reading.field.tracks) <= 1 else "challenge and track"
    parts = [f"{tries} a cell over {formats.count(len(reading.field.columns), noun)}"]
    missing = sum(1 for cell in reading.run.cells if cell.state in ("infra_error", "not_run"))
    if missing:
        parts.append(f"not measured and left out: {formats.count(missing, 'cell')}")
    if "caveat" in reading.run.meta:
        parts.insert(0, str(reading.run.meta["caveat"]))
    if reading.run.waiting:
        parts.append(f"not graded yet: {formats.count(len(reading.run.waiting), 'cell')}")
    if "process" in reading.field.isolation:
        parts.append("isolation was a plain process: not safe for untrusted submissions")
    return "Caveat: " + "; ".join(parts) + ". " + reading.judged_by


def facts(reading: Reading) -> list[tuple[str, str, str]]:
    """Name, figure and a remark for each tile."""
    field, cells = reading.field, reading.run.cells
    found = [
        ("Entrants", str(len(field.entrants)), ""),
        ("Challenges", str(len(field.challenges)), ""),
    ]
    if reading.executed:
        passed = sum(1 for cell in cells if cell.state == "pass")
        fallen = sum(len(cell.fallen()) for cell in cells)
        asked = sum(1 for cell in cells for trap in cell.traps if trap.was_asked)
        level = field.isolation[0] if field.isolation else "–"
        found += [
            ("Cells graded", str(field.progress["graded"]), f"{passed} fulfil the whole contract"),
            ("Traps sprung", str(fallen), f"of {asked} set"),
            ("Isolation", level, "the weakest of several" if len(field.isolation) > 1 else ""),
        ]
    if reading.run.reproduction:
        wrong = sum(row.verdict == "contradiction" for row in reading.run.reproduction)
        printed = f"of {len(reading.run.reproduction)} printed figures"
        found += [("Grades", str(len(cells)), ""), ("Contradictions", str(wrong), printed)]
    red_team = red_team_fact(reading)
    return [*found, red_team] if red_team else found


def red_team_fact(reading: Reading) -> tuple[str, str, str] | None:
    """How many of the known attacks succeeded, if the run records it."""
    red_team = reading.run.meta.get("red_team")
    if not isinstance(red_team, dict) or not red_team.get("attacks"):
        return None
    attacks, won = int(red_team["attacks"]), int(red_team.get("successes", 0))
    return "Red team", f"{100 * won / attacks:.0f} %", f"{won} of {attacks} attacks succeeded"


def pick_rows(reading: Reading) -> list[dict[str, Any]]:
    """The picks that set an entrant apart."""
    found = picks(reading.run.cells, reading.difficulty)
    return [pick_row(pick) for pick in found if pick.decides]


def pick_row(pick: Pick) -> dict[str, Any]:
    why = f"{evidence.number(max(pick.values[name] for name in pick.winners))} {pick.unit}"
    if pick.margin and len(pick.winners) == 1:
        why += f", a {pick.margin} lead"
    elif len(pick.winners) > 1:
        why += ", a tie"
    return {"title": pick.criterion, "entrants": pick.winners, "why": why, "rule": pick.rule}


def _forest(reading: Reading) -> Any:
    rows = [
        plots.Interval(each.entrant, each.rank_low, each.median_rank, each.rank_high)
        for each in reading.ranking.standings[:MOST_IN_PLOT]
    ]
    if len(rows) < 2:
        return None
    label = "95 % rank sets: " + "; ".join(
        f"{row.label} {row.low:.0f} to {row.high:.0f}" for row in rows[:12]
    )
    return plots.forest(rows, "rank", label)
