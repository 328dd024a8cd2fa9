"""One challenge in depth: every answer with its measures, its findings and the code around them."""

from trapline.arena.record import Cell
from trapline.arena.report import findings, source
from trapline.arena.report.markdown.parts import title_of
from trapline.arena.report.markdown.syntax import bullets, join, table, text
from trapline.arena.report.reading import Reading
from trapline.arena.standings.criteria import CRITERIA

#: Findings of one answer.
MOST_FINDINGS = 8


def document(reading: Reading, challenge_id: str) -> str:
    info = reading.field.challenges[challenge_id]
    place = {name: number for number, name in enumerate(reading.order)}
    cells = [cell for cell in reading.run.cells if cell.challenge == challenge_id]
    cells.sort(key=lambda cell: (-(cell.score or 0.0), place[cell.entrant], cell.attempt))
    return join(
        f"# {text(info.title)}",
        text(info.summary),
        _table(reading, cells),
        *(_answer(reading, cell) for cell in cells),
    )


def _table(reading: Reading, cells: list[Cell]) -> list[str]:
    """Criteria down, answers across; those that no answer has are left out."""
    rows = []
    for criterion in CRITERIA:
        values = [criterion.value([cell], reading.anatomies) for cell in cells]
        if any(value is not None for value in values):
            shown = ("–" if value is None else criterion.text(value) for value in values)
            rows.append([criterion.name, *shown])
    return ["## Side by side", "", *table(["Criterion", *map(_name, cells)], rows)]


def _name(cell: Cell) -> str:
    return cell.entrant if cell.attempt == 1 else f"{cell.entrant} ({cell.attempt})"


def _answer(reading: Reading, cell: Cell) -> list[str]:
    score = "" if cell.score is None else f" ({cell.score:.1f})"
    title = title_of(reading, cell.challenge, cell.track)
    bundle = reading.run.bundles.get(cell.bundle)
    found = findings.shown(cell, reading.field.challenges[cell.challenge], bundle)
    lines = [
        f"## {text(_name(cell))} on {text(title)}: {cell.letter or cell.state}{score}",
        "",
        text(findings.opening(cell.reason)),
    ]
    for one in found[:MOST_FINDINGS]:
        lines += ["", f"### {text(one.sentence)}", ""]
        about = [f"{one.finding.severity}, {one.finding.certainty}: {one.finding.cause}"]
        about += [f"call: {one.finding.call}"] if one.finding.call else []
        about += [f"what went wrong: {one.message}"] if one.message else []
        lines += bullets(about)
        code = source.plain_excerpt(one.finding.where, bundle.files if bundle else {})
        if code:
            lines += ["", f"At {text(one.finding.where)}:", "", "~~~~python", code, "~~~~"]
    if len(found) > MOST_FINDINGS:
        lines += ["", f"And {len(found) - MOST_FINDINGS} more findings."]
    return lines
