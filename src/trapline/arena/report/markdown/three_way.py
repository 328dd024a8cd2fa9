"""Several entrants side by side: those that were chosen, or the first three of the standings."""

from trapline.arena.record import Cell
from trapline.arena.report import findings
from trapline.arena.report.markdown.parts import rubric_table, summary, title_of, winner
from trapline.arena.report.markdown.syntax import bullets, join, table, text
from trapline.arena.report.reading import Reading
from trapline.arena.report.runview import MOST_CHOSEN
from trapline.arena.standings.duel import Bout, Duel


def document(reading: Reading) -> str:
    names = [standing.entrant for standing in reading.ranking.standings]
    names = names[: MOST_CHOSEN if reading.run.chosen else 3]
    result = reading.duel(*names)
    title = " vs ".join(text(name) for name in names)
    return join(
        f"# {len(names)}-way head-to-head: {title}",
        summary(reading),
        _executive(reading, result),
        *(_task(reading, result, number, bout) for number, bout in enumerate(result.bouts, 1)),
        ["## Records", "", *bullets(f"{tally.sentence}." for tally in result.records)],
        rubric_table(),
    )


def _executive(reading: Reading, result: Duel) -> list[str]:
    rows: list[list[object]] = [
        ["Place", *(reading.standing[name].place for name in result.entrants)],
        ["Mean score", *(f"{reading.standing[n].mean_score:.1f}" for n in result.entrants)],
    ]
    for bout in result.bouts:
        letters = [bout.letters[name] or "—" for name in result.entrants]
        rows.append([title_of(reading, bout.challenge, bout.track), *letters])
    for edge in result.edges:
        if edge.is_comparison:
            rows.append([edge.criterion, *(edge.text(name) or "–" for name in result.entrants)])
    return ["## Executive summary", "", *table(["Dimension", *result.entrants], rows)]


def _task(reading: Reading, result: Duel, number: int, bout: Bout) -> list[str]:
    info = reading.field.challenges[bout.challenge]
    lines = [f"## Challenge {number}: {text(title_of(reading, bout.challenge, bout.track))}"]
    if info.summary:
        lines += ["", text(info.summary)]
    for name in result.entrants:
        cells = [
            cell
            for cell in reading.cells_of[name]
            if (cell.challenge, cell.track) == (bout.challenge, bout.track)
        ]
        for cell in cells:
            lines += ["", *_entrant(reading, cell)]
    decided = winner(bout.winners, result.entrants, bout.margin)
    return [*lines, "", f"### {text(info.title)} winner: {decided}"]


def _entrant(reading: Reading, cell: Cell) -> list[str]:
    measured = {
        name: dimension
        for name, dimension in cell.dimensions.items()
        if dimension.score is not None
    }
    good = [f"{n}: {d.reason} ({d.score:.0f})" for n, d in measured.items() if (d.score or 0) >= 90]
    bad = [f"{n}: {d.reason} ({d.score:.0f})" for n, d in measured.items() if (d.score or 0) < 70]
    found = findings.gravest_first(reading.findings(cell))
    bad += [f"{finding.severity} finding {finding.cause}: {finding.sentence}" for finding in found]
    score = "" if cell.score is None else f" ({cell.score:.1f})"
    lines = [f"### {text(cell.entrant)}", "", f"Grade: **{cell.letter or cell.state}**{score}"]
    for heading, items in (("Strengths:", good), ("Weaknesses:", bad)):
        if items:
            lines += ["", heading, "", *bullets(items)]
    return lines
