"""The figures of a hand-written report beside ours, contradictions first."""

from collections.abc import Sequence
from typing import Any

from trapline.arena.report.reading import Reading
from trapline.arena.studies import ComparisonRow
from trapline.arena.studies.records import Source


def context(reading: Reading) -> dict[str, Any]:
    rows = sorted(reading.run.reproduction, key=lambda row: row.verdict == "equal")
    wrong = sum(1 for row in rows if row.verdict == "contradiction")
    return {
        "title": "Reproduction",
        "lede": f"{len(rows)} printed figures, computed again from the report's own data: "
        f"{len(rows) - wrong} agree, {wrong} contradict another figure of the same reports.",
        "rows": rows,
        "sources": _sources(reading),
        "groups": _groups([row for row in rows if row.verdict == "contradiction"]),
        "equal": [row for row in rows if row.verdict != "contradiction"],
    }


def _sources(reading: Reading) -> dict[str, Source]:
    """The page of each name that a row gives."""
    printed = reading.run.printed
    names = {name for row in reading.run.reproduction for name in row.sources}
    return {name: printed.source(name) for name in names} if printed else {}


def _groups(rows: Sequence[ComparisonRow]) -> list[tuple[str, list[ComparisonRow]]]:
    """Rows by kind, the most frequent kind first."""
    groups: dict[str, list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
