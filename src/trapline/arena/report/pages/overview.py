"""The first page: what this is, the conclusion, the matrix, the standings."""

from datetime import date
from typing import Any

from trapline.arena.judge import rubric
from trapline.arena.record import Cell
from trapline.arena.report import evidence, findings, formats
from trapline.arena.report.pages import gpu, printed
from trapline.arena.report.pages.traps import moment_row
from trapline.arena.report.reading import Reading
from trapline.arena.standings.board import mean, scores
from trapline.arena.standings.costs import total_cost
from trapline.arena.standings.moments import moments
from trapline.arena.standings.picks import Pick, picks

MOST_MOMENTS = 4


def context(reading: Reading) -> dict[str, Any]:
    ranking = reading.ranking
    return {
        "title": reading.run.meta.get("title") or f"Run {reading.run.name}",
        "what": what(reading),
        "sources": printed.sources(reading),
        "ranking": ranking,
        "caveat": caveat(reading),
        "facts": facts(reading),
        "rows": matrix_rows(reading),
        "column_means": [_column_mean(reading, column) for column in reading.field.columns],
        "caps": (rubric.FAIL_CAP, rubric.CRITICAL_CAP),
        **standings_table(reading),
        "roofline": gpu.roofline(reading.run.cells),
        "picks": pick_rows(reading),
        "moments": [
            moment_row(reading, moment) for moment in moments(reading.run.cells, MOST_MOMENTS)
        ],
    }


def what(reading: Reading) -> str:
    """One line for a reader who was only sent the link."""
    if not reading.executed:
        return "Trapline compares grades that others published and recomputes their figures."
    field, cells = reading.field, reading.run.cells
    traps = sum(len(info.traps) for info in field.challenges.values())
    text = (
        "Trapline grades code for LLM systems by looking for known bugs. Here "
        f"{formats.count(len(field.entrants), 'entrant')} answered "
        f"{formats.count(len(field.challenges), 'challenge')} with {formats.count(traps, 'trap')}"
    )
    systems = sorted({cell.versions.get("system", "") for cell in cells} - {""})
    where = [f"graded {_dates([cell.started.date() for cell in cells])}"] if cells else []
    where += [f"on {', '.join(systems)}"] if systems else []
    where += [f"at isolation level {reading.isolation}"] if field.isolation else []
    return f"{text}; {' '.join(where)}." if where else f"{text}."


def _dates(days: list[date]) -> str:
    first, last = min(days), max(days)
    return f"on {first}" if first == last else f"from {first} to {last}"


def caveat(reading: Reading) -> str:
    """Limits of the run that a reader must know before quoting the ranking."""
    attempts = max((len(s.attempts) for s in reading.field.squares.values()), default=0)
    tries = "one attempt" if attempts <= 1 else f"up to {attempts} attempts"
    parts = [f"{tries} per challenge, {formats.count(len(reading.field.challenges), 'challenge')}"]
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
        bugs = [finding for cell in cells for finding in reading.findings(cell)]
        level = field.isolation[0] if field.isolation else "–"
        found += [
            (
                "Cells graded",
                str(field.progress["graded"]),
                f"{passed} {'holds' if passed == 1 else 'hold'} every contract case",
            ),
            ("Findings", str(len(bugs)), findings.counted(bugs)),
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


def matrix_rows(reading: Reading) -> list[dict[str, Any]]:
    """Each entrant with its squares and mean, those without a place last."""
    means: dict[str, list[float]] = {}
    for (entrant, _), score in scores(reading.run.cells).items():
        means.setdefault(entrant, []).append(score)
    return [
        {
            "entrant": name,
            "squares": reading.field.row(name),
            "mean": mean(means[name]) if name in means else None,
            "apart": name not in reading.standing,
        }
        for name in reading.order
    ]


def _column_mean(reading: Reading, column: Any) -> float | None:
    values = reading.column_scores[column].values()
    return mean(list(values)) if values else None


def standings_table(reading: Reading) -> dict[str, Any]:
    """Rows of the standings; cost and tokens only where a cell records them."""
    cells = reading.run.cells
    placed = [standing_row(reading, standing.entrant) for standing in reading.ranking.standings]
    few = [standing_row(reading, name) for name in reading.ranking.few]
    return {
        "placed": placed,
        "few": sorted(few, key=lambda row: -row["coverage"]),
        "columns": len(reading.field.columns),
        "with_cost": any(row["usd"] is not None for row in [*placed, *few]),
        "with_tokens": any(row["tokens"] for row in [*placed, *few]),
        "with_date": reading.executed,
        "with_findings": any(cell.traps for cell in cells),
    }


def standing_row(reading: Reading, name: str) -> dict[str, Any]:
    cells = reading.cells_of[name]
    scored = [cell for cell in cells if cell.score is not None]
    bugs = [finding for cell in cells for finding in reading.findings(cell)]
    spent = total_cost(cells)
    return {
        "entrant": name,
        "standing": reading.standing.get(name),
        "mean": mean([cell.score for cell in scored if cell.score is not None]) if scored else None,
        "coverage": len({(cell.challenge, cell.track) for cell in scored}),
        "findings": len(bugs),
        "gravity": findings.counted(bugs),
        "usd": spent.usd if spent else None,
        "tokens": spent.input_tokens + spent.output_tokens if spent else 0,
        "date": max((_day(cell) for cell in cells), default=""),
    }


def _day(cell: Cell) -> str:
    """When the answer was made, or else graded."""
    answered = cell.origin.answered if cell.origin else ""
    return (answered or cell.started.isoformat())[:10]


def pick_rows(reading: Reading) -> list[dict[str, Any]]:
    """The picks that set an entrant apart."""
    found = picks(reading.run.cells, reading.difficulty)
    return [pick_row(pick) for pick in found if pick.decides]


def pick_row(pick: Pick) -> dict[str, Any]:
    why = f"{evidence.number(round(max(pick.values[n] for n in pick.winners), 1))} {pick.unit}"
    if pick.margin and len(pick.winners) == 1:
        why += f", a {pick.margin} lead"
    elif len(pick.winners) > 1:
        why += ", a tie"
    return {"title": pick.criterion, "entrants": pick.winners, "why": why, "rule": pick.rule}
