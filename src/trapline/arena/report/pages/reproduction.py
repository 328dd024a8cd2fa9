"""The figures of a hand-written report beside ours, contradictions first."""

from typing import Any

from trapline.arena.report.reading import Reading


def context(reading: Reading) -> dict[str, Any]:
    rows = sorted(reading.run.reproduction, key=lambda row: row.verdict == "equal")
    wrong = sum(1 for row in rows if row.verdict == "contradiction")
    return {
        "title": "Reproduction",
        "lede": f"{len(rows)} printed figures, computed again from the report's own data: "
        f"{len(rows) - wrong} agree, {wrong} contradict another figure of the same reports.",
        "rows": rows,
    }
