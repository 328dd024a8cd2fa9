"""A cell's figures in the form that Inspect's metrics take."""

import math

from trapline.arena.export.grading import dimension_scores
from trapline.arena.record import DIMENSIONS, Cell


def score_values(cell: Cell) -> dict[str, float]:
    """The same names for every cell, so that means exist; NaN is Inspect's "not scored"."""
    measured = dimension_scores(cell)
    return {
        "grade": math.nan if cell.score is None else cell.score,
        **{name: measured.get(name, math.nan) for name in DIMENSIONS},
    }
