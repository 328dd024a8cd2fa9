"""The reproduction table: the printed figure, ours, and whether they agree."""

from trapline.arena.report.markdown.syntax import bold, join, table
from trapline.arena.report.pages.reproduction import context
from trapline.arena.report.reading import Reading


def document(reading: Reading) -> str:
    page = context(reading)
    return join(
        "# Printed figures and our recomputation",
        str(page["lede"]),
        table(
            ["Kind", "What", "Printed", "Ours", "Verdict", "Note", "Source"],
            [
                [
                    row.kind,
                    row.what,
                    row.reported,
                    row.ours,
                    bold(row.verdict) if row.verdict == "contradiction" else row.verdict,
                    row.note,
                    ", ".join(row.sources),
                ]
                for row in page["rows"]
            ],
        ),
    )
