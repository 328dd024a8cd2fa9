"""Head to head: one page for all pairs, and one per pair in a small field."""

from itertools import combinations
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from trapline.arena.record import DIMENSIONS
from trapline.arena.report import findings
from trapline.arena.report.field import Square
from trapline.arena.report.reading import Reading
from trapline.arena.standings import margin
from trapline.arena.standings.criteria import RATIO_RULE

#: Up to this many entrants, each pair has a page; a hundred entrants would need 4,950 pages.
MOST_WITH_PAGES = 12


def context(reading: Reading) -> dict[str, Any]:
    return {
        "title": "Duel",
        "order": reading.order,
        "rule": margin.RULE,
        "data": data(reading),
        "records": records(reading),
    }


def pairs(reading: Reading) -> list[tuple[str, str]]:
    """The pairs that have a page, better standing first."""
    ranked = [name for name in reading.order if name in reading.standing]
    return list(combinations(ranked, 2)) if len(ranked) <= MOST_WITH_PAGES else []


def href(reading: Reading, a: str, b: str) -> str:
    """The address does not depend on who leads, so links stay valid during a run."""
    slugs = reading.field.entrant_slugs
    return f"duels/{'--'.join(sorted((slugs[a], slugs[b])))}.html"


def records(reading: Reading) -> list[tuple[str, list[tuple[str, str]]]]:
    """Won–lost–tied of every row against every column, with the page that shows it."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for a, b in pairs(reading):
        tally = reading.duel(a, b).records[0]
        found[a, b] = f"{tally.won}–{tally.lost}–{tally.tied}", href(reading, a, b)
        found[b, a] = f"{tally.lost}–{tally.won}–{tally.tied}", href(reading, a, b)
    if not found:
        return []
    ranked = list(reading.standing)
    return [(a, [found.get((a, b), ("–", "")) for b in ranked]) for a in ranked]


def pair(reading: Reading, a: str, b: str) -> dict[str, Any]:
    return {
        "title": f"{a} against {b}",
        "duel": reading.duel(a, b),
        "chance": reading.ranking.odds(a, b),
        **_rules(reading),
    }


def together(reading: Reading) -> dict[str, Any]:
    """All entrants of a small run side by side."""
    chosen = reading.order
    return {
        "title": ", ".join(chosen[:-1]) + f" and {chosen[-1]}",
        "duel": reading.duel(*chosen),
        "chance": None,
        **_rules(reading),
    }


def _rules(reading: Reading) -> dict[str, Any]:
    return {
        "rule": margin.RULE,
        "ratio_rule": RATIO_RULE,
        "titles": {
            (column.challenge, column.track): reading.field.column_title(column)
            for column in reading.field.columns
        },
    }


def data(reading: Reading) -> Markup:
    """Everything the page's script needs, safe inside a `<script>`."""
    field = reading.field
    return htmlsafe_json_dumps(
        {
            "rule": {
                "tie": margin.TIE_BAND,
                "narrow": margin.NARROW_BELOW,
                "decisive": margin.DECISIVE_FROM,
            },
            "dimensions": DIMENSIONS,
            "bugs": _bugs(reading),
            "columns": [{"title": field.column_title(column)} for column in field.columns],
            "entrants": [
                {
                    "name": name,
                    "slug": field.entrant_slugs[name],
                    "squares": [_square(square) for square in field.row(name)],
                }
                for name in reading.order
            ],
        }
    )


def _bugs(reading: Reading) -> dict[str, str]:
    """Cause → what the bug is, for those that were found."""
    return {
        finding.cause: findings.opening(finding.sentence)
        for cell in reading.run.cells
        for finding in reading.findings(cell)
        if finding.cause != "unnamed"
    }


def _square(square: Square) -> dict[str, Any] | None:
    if not square.attempts:
        return None
    return {
        "shown": square.shown,
        "score": square.score,
        "href": square.href,
        "dimensions": [_dimension(square, name) for name in DIMENSIONS],
        "fallen": sorted({trap for cell in square.attempts for trap in cell.fallen()}),
    }


def _dimension(square: Square, name: str) -> float | None:
    values = [
        score
        for cell in square.attempts
        if name in cell.dimensions and (score := cell.dimensions[name].score) is not None
    ]
    return round(sum(values) / len(values), 2) if values else None
