"""The whole reproduction table, and the part of it that does not hold."""

from trapline.arena.studies.grades import grade_rows
from trapline.arena.studies.headline import headline_rows
from trapline.arena.studies.matchups import matchup_rows
from trapline.arena.studies.prose import prose_rows
from trapline.arena.studies.records import ReportedField
from trapline.arena.studies.rows import ComparisonRow
from trapline.arena.studies.scorecards import score_rows


def reproduction_table(field: ReportedField) -> list[ComparisonRow]:
    """The report's figure, ours from the same data, and whether they agree; duels first."""
    return [
        *matchup_rows(field),
        *score_rows(field),
        *grade_rows(field),
        *headline_rows(field),
        *prose_rows(field),
    ]


def contradictions(field: ReportedField) -> list[ComparisonRow]:
    """Where the report disagrees with itself."""
    return [row for row in reproduction_table(field) if row.verdict == "contradiction"]
