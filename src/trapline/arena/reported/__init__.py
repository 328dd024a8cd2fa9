"""A comparison written by hand: its figures, what follows from them, where they disagree."""

from trapline.arena.reported.cells import as_cells
from trapline.arena.reported.records import ReportedField
from trapline.arena.reported.rows import Row
from trapline.arena.reported.table import contradictions, reproduction_table

__all__ = ["ReportedField", "Row", "as_cells", "contradictions", "reproduction_table"]
