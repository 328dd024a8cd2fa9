"""One challenge: grades, traps and measures of all entrants."""

import math
from collections import Counter
from typing import Any

from markupsafe import Markup

from trapline.arena.record import DIMENSIONS, Cell
from trapline.arena.report import findings, plots
from trapline.arena.report.pages import gpu, printed
from trapline.arena.report.pages.cell import measure_text
from trapline.arena.report.reading import Reading


def context(reading: Reading, challenge_id: str) -> dict[str, Any]:
    challenge = reading.field.challenges[challenge_id]
    place = {name: index for index, name in enumerate(reading.order)}
    cells = sorted(
        (cell for cell in reading.run.cells if cell.challenge == challenge_id),
        key=lambda cell: (-(cell.score if cell.score is not None else -1.0), place[cell.entrant]),
    )
    measured = [
        name
        for name in DIMENSIONS
        if any(d.score is not None for cell in cells if (d := cell.dimensions.get(name)))
    ]
    return {
        "title": challenge.title,
        "challenge": challenge,
        "rows": cells,
        "flawed": any(cell.flaw for cell in cells),
        "dimensions": measured,
        "measures": list(dict.fromkeys(name for cell in cells for name in cell.measures)),
        "measure_text": measure_text,
        "traps": trap_rows(reading, challenge_id, cells),
        "findings_of": {cell.key: _causes(reading, cell) for cell in cells},
        "figures": figures(cells),
        "printed": printed.of_challenge(reading, challenge_id),
        "by_shape": gpu.by_shape(cells),
        "microseconds": gpu.microseconds,
    }


def _causes(reading: Reading, cell: Cell) -> list[str]:
    return [finding.cause for finding in findings.gravest_first(reading.findings(cell))]


def trap_rows(reading: Reading, challenge_id: str, cells: list[Cell]) -> list[tuple[Any, Any, int]]:
    """Each trap with the cells in which its bug was found and how many ran it, most first."""
    fell: dict[str, list[Cell]] = {}
    asked: Counter[str] = Counter()
    for cell in cells:
        for check in cell.traps:
            asked[check.id] += check.was_asked
            if check.accuses:
                fell.setdefault(check.id, []).append(cell)
    traps = reading.field.challenges[challenge_id].traps
    rows = [(trap, fell.get(trap.id, []), asked[trap.id]) for trap in traps]
    return sorted(rows, key=lambda row: -len(row[1]))


def figures(cells: list[Cell]) -> list[tuple[str, str, Markup]]:
    """Title, note and plot of each measure that at least one cell has."""
    found = [_precision(cells), _speed(cells), _memory(cells), gpu.roofline(cells)]
    return [figure for figure in found if figure]


def _name(cell: Cell) -> str:
    return cell.entrant if cell.attempt == 1 else f"{cell.entrant} ({cell.attempt})"


def _evidence(cell: Cell, dimension: str) -> dict[str, Any]:
    return cell.dimensions[dimension].evidence if dimension in cell.dimensions else {}


def _positive(value: object) -> float | None:
    """The value if it is finite and above zero: a logarithmic axis shows no other."""
    usable = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    return float(value) if usable and isinstance(value, (int, float)) else None


def _precision(cells: list[Cell]) -> tuple[str, str, Markup] | None:
    worst = {}
    for cell in cells:
        ratios = [_positive(ratio) for ratio in _evidence(cell, "precision").get("ratios", [])]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            worst[_name(cell)] = max(known)
    if not worst:
        return None
    note = (
        "Largest error against float64, divided by that of a careful implementation in the same "
        "dtype. The dashed line marks equal errors."
    )
    best, last = min(worst.values()), max(worst.values())
    label = f"Precision of {len(worst)} cells; best {best:.2g}, worst {last:.2g}"
    return "Precision", note, plots.dots(worst, "error ÷ careful error", label, line_at=1.0)


def _speed(cells: list[Cell]) -> tuple[str, str, Markup] | None:
    ratios = {}
    for cell in cells:
        ratio = _positive(_evidence(cell, "speed").get("ratio"))
        if ratio is not None:
            ratios[_name(cell)] = ratio
    if not ratios:
        return None
    note = (
        "Speed against the reference in the same run, on the judge's clock. "
        "Right of the dashed line is faster than the reference."
    )
    slowest, fastest = min(ratios.values()), max(ratios.values())
    label = f"Speed of {len(ratios)} cells; {slowest:.2g} to {fastest:.2g} times the reference"
    return "Speed", note, plots.dots(ratios, "times the reference's speed", label, line_at=1.0)


def _memory(cells: list[Cell]) -> tuple[str, str, Markup] | None:
    series = {}
    for cell in cells:
        found = _evidence(cell, "memory")
        pairs = zip(found.get("sizes", []), found.get("extra_bytes", []), strict=False)
        points = [
            (float(size), peak / 2**20)
            for size, peak in pairs
            if _positive(size) and _positive(peak)
        ]
        if points:
            series[_name(cell)] = points
    if not series:
        return None
    note = (
        "Peak memory above what the process held before the call, by the kernel's figures. "
        "Steeper lines grow faster."
    )
    label = f"Memory growth of {len(series)} cells over the size of the problem"
    return "Memory growth", note, plots.growth(series, "size", "extra MiB", label)
