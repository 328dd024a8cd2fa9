"""A comparison written by hand: its figures, what follows from them, where they disagree."""

from trapline.arena.studies.cells import as_cells
from trapline.arena.studies.records import ReportedField
from trapline.arena.studies.rows import ComparisonRow
from trapline.arena.studies.table import contradictions, reproduction_table

__all__ = ["ComparisonRow", "ReportedField", "as_cells", "contradictions", "reproduction_table"]
